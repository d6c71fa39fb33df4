"""``fxmem doctor``: a description of the installation, for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import Any

from fxmem.cli.shared.output import write_output

HELP = "versions, and whether this torch is supported"
DESCRIPTION = """\
Prints the versions of torch and of what fxmem works with, whether this torch is supported, and
which of the private interfaces that fxmem relies on it lacks."""
EPILOG = """\
exit codes: 0 this torch is supported, and all of its interfaces are there; 1 they are not
"""
_LIBRARIES = ("transformers", "timm", "torchvision", "accelerate", "lightning")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--interfaces",
        action="store_true",
        help="list the private interfaces of torch and all names that an analysis replaces, in"
        " Markdown",
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if arguments.interfaces:
        write_output(write_interfaces() + "\n", None)
        return 0
    lines, is_supported = describe_installation()
    write_output("\n".join(lines) + "\n", None)
    return 0 if is_supported else 1


def describe_installation() -> tuple[list[str], bool]:
    """Describes what is installed, a line for each topic, and judges whether torch is supported."""
    import torch

    import fxmem
    import fxmem.kernels.cpu
    import fxmem.kernels.cuda
    from fxmem.versions.interfaces import INTERFACES, find_missing
    from fxmem.versions.operators import MISSING
    from fxmem.versions.release import is_release

    cuda: Any = torch.cuda
    cudnn: Any = torch.backends.cudnn
    build = "for the CPU alone"
    if torch.version.cuda is not None:
        build = f"for CUDA {torch.version.cuda}, cuDNN {cudnn.version()}"
    gpus = [cuda.get_device_name(at) for at in range(cuda.device_count())]
    listed = (each for each in INTERFACES if not each.is_optional)
    names = sum(len(each.names) for each in listed if is_release(each.since, each.before))
    missing = find_missing()
    verdict, is_supported = _judge_torch(missing)
    state = f"all {names} that this release has" if not missing else f"missing: {missing[0]}"
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    kernels = fxmem.kernels.cpu.CPU, fxmem.kernels.cuda.CUDA
    modelled = {key for target in kernels for key in (*target.kernels, *target.estimators)}
    lines = {
        "fxmem": fxmem.__version__,
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__}, {verdict}",
        "build": f"{build}; {torch.get_num_threads()} threads",
        "GPU": ", ".join(gpus) or "none here, which fxmem does not need",
        "interfaces": state + more,
        "operators": f"{len(modelled)} whose results or buffers are modelled by hand",
        "not in torch": ", ".join(sorted(MISSING)) or "none of the operators that fxmem knows",
        "pictures": _find_engines(),
        "libraries": ", ".join(filter(None, map(_find_version, _LIBRARIES))) or "none",
    }
    return [f"{topic:<13} {text}" for topic, text in lines.items()], is_supported


def _judge_torch(missing: list[str]) -> tuple[str, bool]:
    from fxmem.versions.release import INSTALLED, NEWEST, OLDEST, write_release

    oldest, newest = write_release(OLDEST), write_release(NEWEST)
    if INSTALLED < OLDEST:
        return f"too old: fxmem needs {oldest} or later", False
    if missing:
        return "not supported: interfaces that fxmem relies on are missing", False
    if INSTALLED > NEWEST:
        return f"newer than {newest}, the newest that was tested", True
    return f"supported ({oldest} to {newest})", True


def _find_engines() -> str:
    from fxmem.errors import UsageError
    from fxmem.report.graph.engine import find_engine

    try:
        engine = f"SVG by {find_engine('svg').rpartition('/')[2]}"
    except UsageError as error:
        engine = str(error)
    return ", ".join(filter(None, (engine, _find_version("matplotlib") or "no matplotlib")))


def _find_version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def write_interfaces() -> str:
    """Writes the private interfaces of torch, and the names replaced, as a Markdown table."""
    from tabulate import tabulate

    from fxmem.versions.interfaces import INTERFACES
    from fxmem.versions.release import write_release

    rows = [
        {
            "module or class": f"`{interface.owner}`",
            "names": ", ".join(f"`{name}`" for name in interface.names),
            "since": write_release(interface.since) if interface.since else "",
            "before": write_release(interface.before) if interface.before else "",
            "replaced": "yes" if interface.is_patched else "",
            "used to": interface.purpose,
            "instead": interface.replacement,
        }
        for interface in INTERFACES
    ]
    return tabulate(rows, "keys", "github", disable_numparse=True)
