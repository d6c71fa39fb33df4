"""GPUs by name: how much memory CUDA sees on them, and how fast they are.

Pure data. The memory is what ``torch.cuda.get_device_properties().total_memory`` gives, not what
the box says or ``nvidia-smi`` shows: error correction, page tables and the driver take their share
of it before any program does. That share grows with drivers (an RTX 4090 lost 130 MiB between 2023
and 2026) and is smaller on Windows, so the newest figure found for Linux is used.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from fxmem.errors import UsageError

_MIB = 1024**2

CONTEXT_BYTES = (300 * _MIB, 600 * _MIB)
"""The least and the most that a CUDA context takes of a device's memory.

It holds the driver's own data and the kernels that were loaded, each when it is first used. Seen
with PyTorch on CUDA 12 and 13: about 300 MB (PyTorch issue 107667), 400 MB (issue 109888), 426 MiB
before any kernel on an RTX 6000 Ada. With eager loading, as before CUDA 11.7, it is above 1 GB.
"""

NCCL_BYTES = (256 * _MIB, 1536 * _MIB)
"""The least and the most that NCCL's buffers take for each communicator, outside of PyTorch.

A channel has about 10 MiB for each neighbour, 4 MiB of them by ``NCCL_BUFFSIZE``; a communicator
has up to 32 channels, and neighbours in rings and trees. The least is one ring with 24 channels.
Seen: 544 MB for groups of 2 and 688 MB for groups of 3 and 4 A100s (NVIDIA/nccl issue 964), 1.06 GB
with the CUDA context on 8 H100s (issue 1685, where an all-to-all takes 3.3 GB more), 1.6 GB with
it, and 6 GB for three or more communicators (issue 864).
"""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A kind of GPU, with the peaks of its units without sparsity."""

    key: str  # short and unique: "a100-80gb"
    name: str  # what the driver calls it
    capability: tuple[int, int]  # CUDA compute capability, major and minor
    multiprocessors: int
    capacity_bytes: int  # total memory as CUDA reports it
    capacity_is_measured: bool  # else it is that of a GPU with the same chips and memory
    bandwidth_bytes_per_s: int
    fp32_flops_per_s: int  # without tensor cores
    tf32_flops_per_s: int | None  # None without TF32
    # bfloat16, or float16 before Ampere, with float32 sums; None without tensor cores
    half_flops_per_s: int | None


# Capacities, in MiB: what PyTorch printed on the device, as total_memory, in the line that
# Ultralytics prints at its start, or in an out-of-memory error (those to 0.01 GiB: gh200, gb200,
# a10, rtx-a6000); from public logs, of 2024 to 2026 where there were any. That of the rtx-pro-6000
# is its server edition's. A question mark: not seen.
# Speeds: NVIDIA's data sheets and the white papers of each architecture, without sparsity. The
# bandwidth of the B200 is that of the 7680 bits its driver reports, not the announced 8 TB/s.
#
# key, name, capability, multiprocessors, MiB, GB/s, then TFLOP/s of fp32, tf32 and half
_TABLE = """
gtx1080ti       | NVIDIA GeForce GTX 1080 Ti    |  6.1 |  28 |  11172 |  484 |  11.3 |    - |    -
rtx2080ti       | NVIDIA GeForce RTX 2080 Ti    |  7.5 |  68 |  10825 |  616 |  13.4 |    - | 53.8
rtx3060         | NVIDIA GeForce RTX 3060       |  8.6 |  28 |  11910 |  360 |  12.7 | 12.7 | 25.5
rtx3070         | NVIDIA GeForce RTX 3070       |  8.6 |  46 |   7842 |  448 |  20.3 | 20.3 | 40.6
rtx3080         | NVIDIA GeForce RTX 3080       |  8.6 |  68 |  10002 |  760 |  29.8 | 29.8 | 59.5
rtx3090         | NVIDIA GeForce RTX 3090       |  8.6 |  82 |  24124 |  936 |  35.6 | 35.6 | 71.0
rtx3090ti       | NVIDIA GeForce RTX 3090 Ti    |  8.6 |  84 |  24114 | 1008 |  40.0 | 40.0 | 80.0
rtx4060         | NVIDIA GeForce RTX 4060       |  8.9 |  24 |   7807 |  272 |  15.1 | 15.1 | 30.2
rtx4070         | NVIDIA GeForce RTX 4070       |  8.9 |  46 |  12002 |  504 |  29.1 | 29.1 | 58.3
rtx4080         | NVIDIA GeForce RTX 4080       |  8.9 |  76 | ?15937 |  717 |  48.7 | 48.7 | 97.5
rtx4080super    | NVIDIA GeForce RTX 4080 SUPER |  8.9 |  80 |  15937 |  736 |  52.2 | 52.2 | 104.4
rtx4090         | NVIDIA GeForce RTX 4090       |  8.9 | 128 |  24081 | 1008 |  82.6 | 82.6 | 165.2
rtx5080         | NVIDIA GeForce RTX 5080       | 12.0 |  84 |  15840 |  960 |  56.3 | 56.3 | 112.6
rtx5090         | NVIDIA GeForce RTX 5090       | 12.0 | 170 |  32102 | 1792 | 104.8 | 104.8 | 209.5
p100            | Tesla P100-PCIE-16GB          |  6.0 |  56 |  16269 |  732 |   9.3 |    - |    -
v100-16gb       | Tesla V100-SXM2-16GB          |  7.0 |  80 |  16160 |  900 |  15.7 |    - |  125
v100-32gb       | Tesla V100-SXM2-32GB          |  7.0 |  80 |  32494 |  900 |  15.7 |    - |  125
t4              | Tesla T4                      |  7.5 |  40 |  14913 |  320 |   8.1 |    - |   65
a10             | NVIDIA A10                    |  8.6 |  72 |  22599 |  600 |  31.2 | 62.5 |  125
a10g            | NVIDIA A10G                   |  8.6 |  80 |  22587 |  600 |  31.5 |   35 |   70
a30             | NVIDIA A30                    |  8.0 |  56 |  24164 |  933 |  10.3 |   82 |  165
a40             | NVIDIA A40                    |  8.6 |  84 |  45416 |  696 |  37.4 | 74.8 | 149.7
a100-40gb       | NVIDIA A100-SXM4-40GB         |  8.0 | 108 |  40441 | 1555 |  19.5 |  156 |  312
a100-80gb       | NVIDIA A100-SXM4-80GB         |  8.0 | 108 |  81153 | 2039 |  19.5 |  156 |  312
a100-80gb-pcie  | NVIDIA A100 80GB PCIe         |  8.0 | 108 |  81154 | 1935 |  19.5 |  156 |  312
l4              | NVIDIA L4                     |  8.9 |  58 |  22563 |  300 |  30.3 |   60 |  121
l40s            | NVIDIA L40S                   |  8.9 | 142 |  45457 |  864 |  91.6 |  183 |  362
h100            | NVIDIA H100 80GB HBM3         |  9.0 | 132 |  81089 | 3350 |    67 |  494 |  989
h100-pcie       | NVIDIA H100 PCIe              |  9.0 | 114 |  81008 | 2000 |    51 |  378 |  756
h100-nvl        | NVIDIA H100 NVL               |  9.0 | 132 |  95320 | 3900 |    60 |  417 |  835
h200            | NVIDIA H200                   |  9.0 | 132 | 143156 | 4800 |    67 |  494 |  989
gh200           | NVIDIA GH200 480GB            |  9.0 | 132 |  96768 | 4000 |    67 |  494 |  989
b200            | NVIDIA B200                   | 10.0 | 148 | 182631 | 7670 |    75 | 1125 | 2250
gb200           | NVIDIA GB200                  | 10.0 | 152 | 188733 | 8000 |    80 | 1250 | 2500
rtx-a6000       | NVIDIA RTX A6000              |  8.6 |  84 |  48537 |  768 |  38.7 | 77.4 | 154.8
rtx6000-ada     | NVIDIA RTX 6000 Ada Generation | 8.9 | 142 |  48508 |  960 |  91.1 | 182.1 | 364.2
rtx-pro-6000    | NVIDIA RTX PRO 6000 Blackwell | 12.0 | 188 |  97250 | 1792 | 126 | 251.9 | 503.8
"""

# Other names that people use.
_ALIASES = {
    "h100": "h100-sxm h100-sxm5 h100-80gb",
    "h200": "h200-sxm",
    "a100-40gb": "a100-sxm4-40gb a100-pcie-40gb",
    "v100-16gb": "v100-pcie-16gb",
    "v100-32gb": "v100-pcie-32gb",
    "rtx-pro-6000": "rtx-pro-6000-blackwell-workstation-edition "
    "rtx-pro-6000-blackwell-server-edition",
}


def _parse_row(row: str) -> GpuModel:
    key, name, capability, count, mib, gb_per_s, *tera = (cell.strip() for cell in row.split("|"))
    major, _, minor = capability.partition(".")
    fp32, tf32, half = (None if text == "-" else round(float(text) * 10**12) for text in tera)
    assert fp32 is not None
    return GpuModel(
        key=key,
        name=name,
        capability=(int(major), int(minor)),
        multiprocessors=int(count),
        capacity_bytes=int(mib.removeprefix("?")) * _MIB,
        capacity_is_measured=not mib.startswith("?"),
        bandwidth_bytes_per_s=int(gb_per_s) * 10**9,
        fp32_flops_per_s=fp32,
        tf32_flops_per_s=tf32,
        half_flops_per_s=half,
    )


GPUS = tuple(map(_parse_row, _TABLE.strip().splitlines()))
"""All that are known, consumer GPUs first."""


def find_gpu(text: str) -> GpuModel:
    """Finds a GPU by its key, by what the driver calls it, or by a name people use.

    Case, spaces, dashes and the vendor's prefixes do not matter.

    Raises:
        UsageError: No GPU is called that, or several are.

    >>> find_gpu("NVIDIA GeForce RTX 4090").key, find_gpu("rtx-4090").key, find_gpu("4090").key
    ('rtx4090', 'rtx4090', 'rtx4090')
    """

    def normalise(name: str) -> str:
        return re.sub(r"nvidia|geforce|tesla|\b[rg]tx|[^a-z0-9]", "", name.lower())

    wanted, names = normalise(text), dict[str, GpuModel]()
    for gpu in GPUS:
        called = (gpu.name, gpu.key, *_ALIASES.get(gpu.key, "").split())
        names |= dict.fromkeys(map(normalise, called), gpu)
    if wanted in names:
        return names[wanted]
    near = [gpu.key for gpu in GPUS if wanted and normalise(gpu.key).startswith(wanted)]
    if near:
        raise UsageError(
            f"several GPUs are called {text!r}", hint=f"choose one of {', '.join(near)}"
        )
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.75)
    hint = f"did you mean {names[close[0]].key}?" if close else "e.g. h100, a100-80gb, rtx4090, t4"
    raise UsageError(f"unknown GPU {text!r}", hint=hint)
