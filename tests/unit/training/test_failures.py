"""One line for a step that cannot be run: what the code asked for, where, and what to try."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Runs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import fxmem
from fxmem.versions.release import is_release

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python does not say which expression failed"
)


def make(code: Callable[..., Any]) -> nn.Module:
    def run(net: Any, x: Tensor, *inputs: Tensor) -> Any:
        return code(net, x * net.scale, *inputs)

    return Runs(run, scale=nn.Parameter(torch.ones(1)), list=nn.ModuleList([nn.Linear(4, 4)]))


def branch(net: Any, x: Tensor) -> Tensor:
    if x.mean() > 0:
        return x
    return -x


def branch_on_any(net: Any, x: Tensor) -> Tensor:
    if (x > 0).any():
        return x
    return -x


def choose_among_many(net: Any, x: Tensor) -> Tensor:
    return [x, -x][(x.sum() + x.mean() + x.std() + x.var() + x.amax() + x.amin()).item() > 0]


def compare(net: Any, x: Tensor) -> Tensor:
    return x if torch.equal(x, x * 2) else -x


DECIDE = "let a shape or an argument of the model decide, not the data"
TENSORS = "stay with tensors in what is analysed, and take numbers out of them elsewhere"
FOUND = (
    "give a size hint, how many elements are found: --size-hint N or size_hint=N; "
    "for this line alone, --size-hint {}=N"
)
SIZE = (
    "if it is a size, give a size hint: --size-hint N or size_hint=N; for this line alone, "
    "--size-hint {}=N"
)


@pytest.mark.parametrize(
    ("code", "quote", "hint"),
    [
        (branch, "if x.mean() > 0", DECIDE),
        (branch_on_any, "if (x > 0).any()", DECIDE),
        (
            choose_among_many,
            "(x.sum() + x.mean() + x.std() + x.var() + x.amax() + x.am...",
            TENSORS,
        ),
        (compare, "torch.equal(x, x * 2)", DECIDE),
        (lambda net, x: x * x.max().item(), "x.max().item()", TENSORS),
        (lambda net, x: x * x.detach().numpy().sum(), "x.detach().numpy()", TENSORS),
        (lambda net, x: len(f"{x.mean():.3f}"), 'f"{x.mean():.3f}"', TENSORS),
        (lambda net, x: x[: int(x.argmax())], "int(x.argmax())", SIZE),
        (lambda net, x: x[x > 0], "x[x > 0]", FOUND),
        (lambda net, x: torch.where(x > 0)[0], "torch.where(x > 0)", FOUND),
        (
            lambda net, x: pack_padded_sequence(x, x[:, 0].long()),
            "pack_padded_sequence(x, x[:, 0].long())",
            "the lengths decide sizes: from Python, give them as a real tensor (of integers, on "
            "the CPU) or numbers; or make them in the model, torch.full(...)",
        ),
    ],
)
def test_a_value_that_is_asked_for_is_quoted(
    code: Callable[..., Any], quote: str, hint: str
) -> None:
    with pytest.raises(fxmem.DataDependentError) as caught:
        fxmem.analyze(make(code), ("3x4",), mode="infer")
    line = f"test_failures.py:{_find_line(code, quote)}"
    assert str(caught.value) == (
        f"`{quote}` at {line} needs tensor values; fxmem analyses shapes only ({hint.format(line)})"
    )


def test_a_value_that_a_library_asks_for_is_to_be_given(tmp_path: Path) -> None:
    """As transformers 4 asks an attention mask whether it masks anything."""
    path = tmp_path / "site-packages" / "masks.py"
    path.parent.mkdir()
    path.write_text(
        "from torch import nn\n\nclass Masked(nn.Module):\n    def forward(self, mask):\n"
        "        return None if (mask == 1).all() else mask\n"
    )
    library: dict[str, Any] = {"__name__": "masks"}
    exec(compile(path.read_text(), str(path), "exec"), library)
    with pytest.raises(fxmem.DataDependentError) as caught:
        fxmem.analyze(library["Masked"](), ("3x4:int64",), mode="infer")
    assert caught.value.hint == (
        "a library asks: from Python, give the input that it looks at as a real tensor"
    )


def _find_line(code: Callable[..., Any], quote: str) -> int:
    first = code.__code__.co_firstlineno
    with open(__file__, encoding="utf-8") as file:
        lines = file.read().splitlines()
    quote = quote.removesuffix("...")
    return next(n for n in range(first, first + 4) if quote in lines[n - 1])


def test_a_size_hint_that_does_not_help_is_not_offered_again() -> None:
    with pytest.raises(fxmem.DataDependentError) as caught:
        fxmem.analyze(make(branch), ("3x4",), size_hint=3)
    assert caught.value.hint == DECIDE


def checks_its_values(net: Any, x: Tensor) -> Tensor:
    assert (x < 100).all(), "too large"
    assert not (x > 100).any()
    if x.min() < 0 or x.max() > 1:
        raise ValueError("not between 0 and 1")
    return x


def samples(net: Any, x: Tensor) -> Tensor:
    distribution = torch.distributions.Categorical(logits=x)
    return distribution.log_prob(distribution.sample())


@pytest.mark.parametrize("code", [checks_its_values, samples])
def test_checks_that_only_raise_pass(code: Callable[..., Any]) -> None:
    assert fxmem.analyze(make(code), ("3x4",)).peak_bytes > 0


def changes_what_backward_needs(net: Any, x: Tensor) -> Tensor:
    y = x.exp()
    y.add_(1)
    return y


def leave(net: Any, x: Tensor) -> Tensor:
    raise SystemExit(3)


def fail(net: Any, x: Tensor) -> Tensor:
    raise RuntimeError("expects a square\nimage")


@torch.library.custom_op("fxmem_test::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


DEBUG = "see the whole traceback with --debug"
NO_GPU = "there is no GPU in an analysis: leave out what needs one besides tensors"


@pytest.mark.parametrize(
    ("code", "cause", "hint"),
    [
        (
            changes_what_backward_needs,
            "backward needs the result of Exp, which the model changes in place afterwards",
            "training it fails everywhere: take the operation that is not in place",
        ),
        (leave, "the model called exit(3) at {}", "let forward return"),
        (fail, "the step failed at {}: RuntimeError: expects a square", DEBUG),
        (
            lambda net, x: net.missing(x),
            "the step failed at {}: AttributeError: 'Runs' object has no attribute 'missing'",
            DEBUG,
        ),
        (
            lambda net, x: net.list(x),
            "ModuleList is called at {} and has no method forward",
            "define forward(self, ...) in it; of a ModuleList, call the modules one by one",
        ),
        (
            lambda net, x: x.view(-1, 7),
            "the step failed at {}: RuntimeError: shape '[-1, 7]' is invalid for input of size 12",
            "check shapes and dtypes of the inputs: 3x4:float32",
        ),
        (
            lambda net, x: x.repeat(10**9, 10**6),
            "a tensor of 3000000000x4000000 elements at {} fits no device",
            "check the inputs' sizes",
        ),
        (
            lambda net, x: functional.embedding(x, torch.ones(3, 4)),
            "the step failed at {}: RuntimeError: Expected tensor for argument #1 'indices' to "
            "have one of the following scalar types: Long, Int; but got torch.float32 instead",
            "an input of integers is written 4x8:int64; the inputs are 3x4:float32",
        ),
        (
            lambda net, x: torch.distributed.all_reduce(x),
            "the step failed at {}: ValueError: Default process group has not been initialized, "
            "please make sure to call init_process_group.",
            "say how many processes there are: --mesh dp=8, or mesh= in Python",
        ),
        (
            lambda net, x: torch.cuda.graph_pool_handle(),
            "the step failed at {}: RuntimeError: Tried to instantiate dummy base class"
            " _graph_pool_handle",
            NO_GPU,
        ),
        pytest.param(
            lambda net, x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged),
            "tensors of torch.nested at {} are not supported",
            "pad them",
            marks=pytest.mark.skipif(not is_release(since=(2, 13)), reason="asserts say nothing"),
        ),
        (
            lambda net, x: opaque(x),
            "the operator fxmem_test::opaque at {} does not run on tensors without data",
            "give it a fake kernel with torch.library.register_fake",
        ),
    ],
)
def test_what_else_goes_wrong(code: Callable[..., Any], cause: str, hint: str) -> None:
    with pytest.raises(fxmem.TraceError) as caught:
        fxmem.analyze(make(code), ("3x4",))
    first = code.__code__.co_firstlineno
    places = [f"test_failures.py:{line}" for line in (first, first + 1)]
    assert caught.value.cause in [cause.format(place) for place in places]
    assert caught.value.hint == hint


def test_sequences_packed_outside_are_to_be_packed_inside() -> None:
    sequences = pack_sequence([torch.randn(5, 8), torch.randn(3, 8)])
    with pytest.raises(fxmem.TraceError) as caught:
        fxmem.analyze(nn.Sequential(nn.LSTM(8, 4)), (sequences,), device="cpu")
    assert caught.value.hint is not None and caught.value.hint.startswith(
        "values of a tensor are read, which has none: sequences are to be packed in forward; the"
        " inputs are [0].data=8x8:float32"
    )


def test_a_graph_kept_from_step_to_step() -> None:
    def remember(net: Any, x: Tensor) -> Tensor:
        net.state = torch.tanh(net.linear(x) * net.state)
        return net.state

    model = Runs(remember, linear=nn.Linear(4, 4), state=torch.zeros(()))
    with pytest.raises(fxmem.TraceError, match=r"^backward runs a second time") as caught:
        fxmem.analyze(model, ("3x4",))
    assert "detach()" in caught.value.hint


def test_an_extension_that_does_not_compile() -> None:
    def build(net: Any, x: Tensor) -> Tensor:
        raise RuntimeError("Error building extension 'fused': [1/3] nvcc -MD -MF fused.cuda.o.d")

    with pytest.raises(fxmem.TraceError, match=r"^the extension fused of C\+\+ or CUDA at "):
        fxmem.analyze(make(build), ("3x4",))


def test_what_a_fake_kernel_raises_is_not_logged_as_well(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(fxmem.TraceError, match="expected scalar type"):
        fxmem.analyze(make(lambda net, x: torch.bmm(x, x.long())), ("3x4x4",))
    assert caplog.records == []
    with FakeTensorMode(), pytest.raises(RuntimeError):
        torch.bmm(torch.ones(3, 4, 4), torch.ones(3, 4, 4).long())
    assert caplog.records != []


def test_what_fails_only_while_it_is_traced_is_tried_without() -> None:
    def count(net: Any, x: Tensor) -> Tensor:
        if type(x.shape[0]) is not int:
            raise ValueError
        return x

    analysis = fxmem.analyze(make(count), ("3x4",))
    assert analysis.frontend == "record"
    assert "ValueError" in analysis.setup.frontend_reason
