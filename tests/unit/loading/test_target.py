"""TARGET to module: what loads, on what tensors, and the one line for what does not."""

from __future__ import annotations

import random
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import fxmem
from fxmem.errors import LoadError
from fxmem.fakes.devices import translate_devices
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.fakes.swapping import swap_in_fakes
from fxmem.loading.target import load_function, load_target, prepare_targets

NETS = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, width, depth=2):
            super().__init__()
            self.body = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

        def forward(self, x):
            return self.body(x)

    class Rates(nn.Module):
        def __init__(self):
            super().__init__()
            self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
            self.embedding = nn.Embedding(4, 4)
            self.head = nn.Linear(4, 4)
            self.head.weight = self.embedding.weight
            nn.init.trunc_normal_(self.head.weight)

    class LooksAtValues(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            assert self.linear.weight.sum().item() < 100

    class Factory:
        @staticmethod
        def make(width):
            return Net(width)

    def make_on_gpu():
        return Rates().half().to("cuda")

    def make_casting():
        return nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3)).to("cpu").half().float().cuda()

    def make_nothing():
        pass

    def fail():
        raise ValueError("no such width")

    config = {}
    instance = nn.Linear(2, 2)

    def take_mean(output):
        return output.mean()

    def make_loss(weight):
        return lambda output: output.mean() * weight

    def leave():
        raise SystemExit(3)

    class Forgets(nn.Module):
        def __init__(self):
            self.linear = nn.Linear(2, 2)

    def load_weights():
        return torch.load("best.pt")
"""

Write = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def clean_imports(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Forgets what this test and others import from temporary folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    base = str(tmp_path_factory.getbasetemp())

    def forget_modules() -> None:
        for name, module in [*sys.modules.items()]:
            if (getattr(module, "__file__", None) or "").startswith(base):
                del sys.modules[name]

    forget_modules()
    yield
    forget_modules()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    write_file("nets.py", NETS)
    return write_file


def load(target: str) -> nn.Module:
    with prepare_targets(target), translate_devices():
        return load_target(target, make_fake_mode())


def explain(target: str) -> str:
    with pytest.raises(LoadError) as caught:
        load(target)
    return str(caught.value)


def is_fake(model: nn.Module) -> bool:
    return all(isinstance(parameter, FakeTensor) for parameter in model.parameters())


@pytest.mark.parametrize(
    "target",
    [
        "nets:Net(3)",
        "nets.py:Net(3)",
        "./nets.py:Net(width=3, depth=2)",
        "nets:Factory.make(3)",
        "nets.py:Factory.make( 3 )",
    ],
)
def test_every_form_of_a_target_loads_on_fakes(write: Write, target: str) -> None:
    model = load(target)
    assert is_fake(model)
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(3, 3), (3,)] * 2


def test_literals_may_hold_colons_and_quotes(write: Write) -> None:
    write(
        "keep.py",
        "from torch import nn\ndef keep(*a, **k):\n m = nn.ReLU(); m.got = a, k; return m",
    )
    model = load("keep:keep('a:b', {'x': [1, (2.5, None)]}, flag=True, n=-1)")
    assert model.got == (("a:b", {"x": [1, (2.5, None)]}), {"flag": True, "n": -1})


def test_an_instance_is_given_back_as_it_is(write: Write) -> None:
    model = load("nets:instance")
    assert model is sys.modules["nets"].instance
    assert not is_fake(model)


def test_a_constructor_that_reads_values_still_takes_no_memory(write: Write) -> None:
    model = load("nets:Rates")
    assert is_fake(model)
    assert model.rates == [0.0, 0.5, 1.0]
    assert model.head.weight is model.embedding.weight


def test_a_constructor_that_reads_parameters_is_built_for_real(write: Write) -> None:
    model = load("nets:LooksAtValues")
    assert not is_fake(model)
    with swap_in_fakes(model, make_fake_mode(), train=True):
        assert is_fake(model)


@pytest.mark.parametrize("name", ["make_on_gpu", "make_casting"])
def test_a_factory_may_cast_and_move_to_a_gpu(write: Write, name: str) -> None:
    model = load(f"nets:{name}")
    assert is_fake(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    dtype = torch.float16 if name == "make_on_gpu" else torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    if name == "make_on_gpu":
        assert model.head.weight is model.embedding.weight


def test_random_numbers_and_defaults_are_left_as_found(write: Write) -> None:
    numpy = pytest.importorskip("numpy")
    write(
        "seeds.py",
        """
        import random, numpy, torch
        torch.manual_seed(1); random.seed(1); numpy.random.seed(1)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.rand(3)
        model = torch.nn.Linear(2, 2)
        """,
    )
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    load("seeds:model")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert numpy.random.get_state()[1].tolist() == states[2]
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


def test_a_file_imports_its_siblings(write: Write, tmp_path: Path) -> None:
    write("deep/sibling.py", "from torch import nn\nmodel = nn.ReLU()")
    write("deep/main.py", "from sibling import model")
    assert isinstance(load("deep/main.py:model"), nn.ReLU)
    assert str(tmp_path / "deep") not in sys.path
    assert str(tmp_path) in sys.path


def test_a_file_in_a_package_imports_relatively(write: Write) -> None:
    write("work/pack/__init__.py", "")
    write("work/pack/layers.py", "from torch import nn\nmodel = nn.ReLU()")
    write("work/pack/main.py", "from .layers import model")
    assert isinstance(load("work/pack/main.py:model"), nn.ReLU)


def test_a_file_may_be_called_like_a_known_module(write: Write) -> None:
    write("other/random.py", "from torch import nn\nmodel = nn.ReLU()")
    assert isinstance(load("other/random.py:model"), nn.ReLU)
    assert sys.modules["random"] is random


def test_a_file_is_read_again(write: Write) -> None:
    path = write("change.py", "from torch import nn\nmodel = nn.ReLU()")
    load("change.py:model")
    path.write_text("from torch import nn\nmodel = nn.Tanh()  # longer than before")
    assert isinstance(load("change.py:model"), nn.Tanh)


LITERALS = "pass numbers, strings, True, None, lists, tuples or dicts, e.g. factory(depth=50)"
FORMS = "write package.module:Model, path/to/file.py:Model or module:factory(depth=50)"
MEANT = "name an nn.Module class or instance, or a function that returns one"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nets", "target 'nets' does not say which model (write nets:Model)"),
        (
            "nets.py",
            "target 'nets.py' does not say which model "
            "(write nets.py:Net, or Rates, LooksAtValues, Forgets)",
        ),
        (
            "model.pt:Net",
            "'model.pt' contains weights, not code "
            "(name the code of the model: path/to/file.py:Model)",
        ),
        (".", "'.' is a folder (name a .py file in it, and what is in it)"),
        (
            "nets:load_weights",
            "'nets:load_weights' raised FileNotFoundError: [Errno 2] No such file or directory: "
            "'best.pt' at nets.py:62 (memory does not depend on values: build the model without "
            "loading weights)",
        ),
        ("?", "target '?' does not say which model (write package.module:Model)"),
        ("nets:", f"target 'nets:' cannot be understood ({FORMS})"),
        ("a b:c", f"target 'a b:c' cannot be understood ({FORMS})"),
        ("nets:Net(x)", f"bad arguments '(x)' in target 'nets:Net(x)' ({LITERALS})"),
        ("nets:Net(**a)", f"bad arguments '(**a)' in target 'nets:Net(**a)' ({LITERALS})"),
        (
            "nope:Net",
            "no module named 'nope' (is it installed here, or below the current folder? "
            "or name its file: path/to/file.py:Net)",
        ),
        ("net.py:Net", "there is no file 'net.py' (did you mean nets.py?)"),
        ("nets:Nett(3)", "no 'Nett' in 'nets' (did you mean Net?)"),
        (
            "nets:zzz",
            "no 'zzz' in 'nets' (models there: Forgets, LooksAtValues, Net, Rates, instance)",
        ),
        ("nets:Factory.zzz", "no 'zzz' in 'nets:Factory' (models there: none)"),
        ("nets:config", f"'nets:config' must be a model, got dict ({MEANT})"),
        (
            "nets:instance(3)",
            "'nets:instance(3)': instance is a model already, it takes no arguments "
            "(write 'nets:instance')",
        ),
        (
            "nets:Net",
            "'nets:Net': missing a required argument: 'width'; it is Net(width, depth=2) "
            "(pass literals: 'nets:Net(width=...)'; or name a function that returns it)",
        ),
        ("nets:make_nothing", f"'nets:make_nothing' returned None, not an nn.Module ({MEANT})"),
        (
            "nets:fail",
            "'nets:fail' raised ValueError: no such width at nets.py:43 "
            "(see the whole traceback with --debug)",
        ),
        (
            "nets:leave",
            "'nets:leave' calls exit(3) at nets.py:55 "
            "(name a class, or a function that returns the model)",
        ),
        (
            "nets:Forgets",
            "'nets:Forgets' raised AttributeError: cannot assign module before Module.__init__() "
            "call at nets.py:59 (begin its __init__ with super().__init__())",
        ),
    ],
)
def test_one_line_says_why_a_target_does_not_load(write: Write, target: str, message: str) -> None:
    assert explain(target) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "1 / 0",
            "cannot be imported: ZeroDivisionError: division by zero at broken.py:1 "
            "(see the whole traceback with --debug)",
        ),
        (
            "x = (",
            "cannot be imported: SyntaxError: '(' was never closed at broken.py:1 "
            "(see the whole traceback with --debug)",
        ),
        (
            "raise SystemExit(3)",
            "exits when it is imported at broken.py:1 "
            "(put what runs as a script under: if __name__ == '__main__')",
        ),
        (
            "import torch\n"
            "model = torch.nn.Linear(2, 2)\n"
            "for _ in range(10**9):\n"
            "    model(torch.ones(2, 2)).sum().backward()",
            "trains when it is imported at broken.py:4 "
            "(put what runs as a script under: if __name__ == '__main__')",
        ),
        (
            "open('/no/such/data')",
            "cannot be imported: FileNotFoundError: [Errno 2] No such file or directory: "
            "'/no/such/data' at broken.py:1 (see the whole traceback with --debug; "
            "put what runs as a script under: if __name__ == '__main__')",
        ),
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            "cannot be imported: RuntimeError: operator torchvision::nms does not exist at "
            "broken.py:1 (torch and torchvision do not fit together: reinstall both from one "
            "index)",
        ),
    ],
)
def test_one_line_says_why_a_module_does_not_import(write: Write, text: str, message: str) -> None:
    write("broken.py", text)
    assert explain("broken.py:Net") == f"'broken.py' {message}"
    assert explain("broken:Net") == f"'broken' {message}"
    assert "broken" not in sys.modules


@pytest.mark.parametrize("text", ["\nimport not_there.part", "def Net():\n    import not_there"])
def test_a_package_that_is_missing_is_to_be_installed(write: Write, text: str) -> None:
    write("broken.py", text)
    for form in ("broken", "broken.py"):
        assert explain(f"{form}:Net") == (
            "broken.py:2 imports 'not_there', which is not installed "
            "(pip install not_there, or put its folder on PYTHONPATH)"
        )


def test_a_package_is_to_be_installed_by_the_name_that_pip_knows(write: Write) -> None:
    write("broken.py", "import skimage.io")
    assert explain("broken:Net").endswith(
        "(pip install scikit-image, or put its folder on PYTHONPATH)"
    )


def test_a_module_that_a_package_has_no_more_needs_another_release(write: Write) -> None:
    write("broken.py", "from torch._six import inf")  # as many scripts of 2021 import
    assert explain("broken:Net") == (
        "broken.py:1 imports 'torch._six', which the installed torch does not have "
        "(it needs another release of torch)"
    )


def test_a_folder_and_a_file_named_as_a_module_are_pointed_out(write: Write) -> None:
    write("src/deep.py", "")
    assert explain("./src:Net") == "'./src' is a folder (name a .py file in it)"
    assert explain("src.deeper:Net").startswith("no module named 'src.deeper'")


def test_a_name_that_fails_to_import_on_access_is_explained(write: Write) -> None:
    write("late.py", "def __getattr__(name):\n    raise RuntimeError('needs a codec')")
    assert explain("late:Net") == (
        "'late' cannot be imported: RuntimeError: needs a codec at late.py:2 "
        "(see the whole traceback with --debug)"
    )


def test_a_relative_import_without_its_package_is_explained(write: Write) -> None:
    write("loose/main.py", "from .layers import model")
    assert explain("loose/main.py:model").endswith(
        "(put an __init__.py beside it, or name it package.module:model)"
    )


def test_a_file_sees_its_folder_and_its_defaults_while_targets_are_prepared(write: Write) -> None:
    write("deep/late.py", "factor = 2")
    write(
        "deep/main.py",
        """
        import torch
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("cuda")

        class Net(torch.nn.Module):
            def forward(self, x):
                from late import factor
                return x * factor * torch.ones(3)
        """,
    )
    analysis = fxmem.analyze("deep/main.py:Net", ("2x3",), mode="infer", device="cpu")
    assert analysis.nodes[-1].dtype == "float64"
    assert analysis.setup.notes == ("The code names devices (cuda): taken as the target, cpu.",)
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device().type == "cpu"


def test_a_function_is_loaded_too(write: Write) -> None:
    with prepare_targets("nets.py:take_mean"):
        assert load_function("nets.py:take_mean")(torch.ones(3)) == 1
        assert load_function("nets.py:make_loss(weight=2)")(torch.ones(3)) == 2
        module = sys.modules["nets"]
        assert load_function("nets.py:take_mean") is module.take_mean


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "nets:config",
            "'nets:config' must be a function, got dict (name a function of the file or module)",
        ),
        ("nets:take_mena", "no 'take_mena' in 'nets' (did you mean take_mean?)"),
        (
            "nets:qqq",
            "no 'qqq' in 'nets' (functions there: fail, leave, load_weights, make_casting, "
            "make_loss, make_nothing, make_on_gpu, take_mean)",
        ),
        (
            "nets:make_loss()",
            "'nets:make_loss()': missing a required argument: 'weight'; it is make_loss(weight) "
            "(pass literals: 'nets:make_loss(weight=...)'; or name a function that returns it)",
        ),
        (
            "nets:fail()",
            "'nets:fail()' raised ValueError: no such width at nets.py:43 "
            "(see the whole traceback with --debug)",
        ),
    ],
)
def test_one_line_says_why_a_function_does_not_load(
    write: Write, target: str, message: str
) -> None:
    with prepare_targets(target), pytest.raises(LoadError) as caught:
        load_function(target)
    assert str(caught.value) == message


def test_a_loss_and_an_optimizer_from_the_model_s_file(write: Write) -> None:
    write(
        "whole.py",
        """
        import torch

        class Output:
            def __init__(self, scores):
                self.scores = scores

        class Net(torch.nn.Linear):
            def forward(self, x):
                return Output(super().forward(x))

        def loss(output):
            assert isinstance(output, Output)
            return output.scores.mean()

        def optimizer(parameters):
            return torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True)
        """,
    )
    own = {"loss": "whole.py:loss", "optimizer": "whole.py:optimizer"}
    analysis = fxmem.analyze("whole.py:Net(3, 3)", ("2x3",), device="cpu", **own)
    assert {"loss": analysis.setup.loss, "optimizer": analysis.setup.optimizer} == own
    # exp_avg, exp_avg_sq and max_exp_avg_sq, and a step for each of two parameters
    assert analysis.optimizer_state_bytes == 3 * analysis.parameter_bytes + 2 * 4
