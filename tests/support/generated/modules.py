"""Random modules as source code: a small program over a pool of tensors.

Each statement is tried on meta tensors as it is drawn, with autograd on, and left out where
PyTorch refuses it; so every program runs. The code is what a counterexample shows.
"""

from __future__ import annotations

import linecache
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.cases import Case, Spec
from benchmarks.step import default_loss

FILE = "generated_module_{}.py"
MAX_NUMEL = 20_000


class Scaled(torch.autograd.Function):
    """Saves its input and an intermediate result; its backward is Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        gate = torch.sigmoid(x * factor)
        ctx.save_for_backward(x, gate)
        ctx.factor = factor
        return x * gate

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, gate = ctx.saved_tensors
        return grad * gate + grad * x * gate * (1 - gate) * ctx.factor, None


_TEMPLATES = {
    "unary": """
F.relu({a}) | F.gelu({a}) | torch.tanh({a}) | {a}.sigmoid() | {a} * 2 | {a} + 1.5 | {a}.exp()
F.silu({a}) | F.dropout({a}, 0.1, self.training) | {a}.softmax(-1) | {a}.square() | -{a}
{a}.clamp(min=0) | ({a} * {a} + 1).sqrt() | F.leaky_relu({a}, 0.1) | {a}.log_softmax(-1) | {a} / 3
{a}.abs().add(1).log() | F.hardswish({a}) | F.softplus({a}) | {a} ** 3 | F.elu({a})
{a}.cumsum(-1) | {a}.roll(1, -1) | {a}.flip(-1) | {a}.clone() | {a}.contiguous() | {a}.detach()
{a} - {a}.mean(-1, keepdim=True) | {a} * {a}.amax(-1, keepdim=True) | {a}.sort(-1).values
{a} / {a}.norm(dim=-1, keepdim=True) | {a}.std(-1, keepdim=True) * {a} | {a}.tril() | {a} * {a}
{a}.max(-1, keepdim=True).values * {a} | {a}.median(-1).values | {a}.topk(2, -1).values
{a}.double().float() | {a}.to(torch.bfloat16).float() | F.normalize({a}, dim=-1) | {a}.var(0)
F.pad({a}, (1, 1)) | F.glu({a}) | {a}.mean(0) | {a}.sum(-1) | F.layer_norm({a}, {a}.shape[-1:])
Scaled.apply({a}, 0.5) | helper({a}) | {a}.logsumexp(-1) | {a}.repeat_interleave(2, 0)
torch.where({a} > 0, {a}, 0.1) | torch.where({a} > 0, {a}, {a} * 0.1) | {a}.sum() * {a}
{a}.new_zeros({a}.shape) + {a} | torch.zeros_like({a}) + {a} | {a} + {a}
{a}.repeat(2, *[1] * ({a}.dim() - 1)) | torch.einsum('...i,...j->...ij', {a}, {a}).sum(-1)
{a} * torch.arange({a}.shape[-1]) | {a}.mul(2).add(1).relu() | F.max_pool2d({a}, 2)
F.avg_pool2d({a}, 2) | F.interpolate({a}, scale_factor=2.0) | {a}.cummax(-1).values
F.adaptive_avg_pool2d({a}, 1) | F.scaled_dot_product_attention({a}, {a}, {a}) | {a}.prod(-1)
{a} @ {a}.transpose(-1, -2) | {a}.index_select(-1, self.index) | {a}[..., self.index]
{a}[self.index] | {a}.gather(-1, {a}.detach().argsort(-1)) | {a}.take(self.index)
{a}.masked_fill({a} < 0, 0.5) | F.embedding(self.index, {a}) | {a}.T @ {a} | F.linear({a}, {a})
{a}.scatter(-1, {a}.detach().argsort(-1), 0.5) | {a}.kthvalue(1, -1).values | {a}.diff(dim=-1)
{a}.norm() * {a} | {a}.min() + {a} | {a}.max() * {a}
F.smooth_l1_loss({a}, {a}.detach() * 0.5) * {a}
F.mse_loss({a}, {a}.detach() * 0.5, reduction='none') | {a}.mean((0, -1), keepdim=True) * {a}
{a}.triu(1) | {a}.neg().exp() | {a}.erf() | {a}.sin() * {a}.cos()
{a}.addcmul({a}, {a}, value=0.5) | torch.lerp({a}, {a} * 2, 0.3) | torch.baddbmm({a}, {a}, {a})
{a}.sign() * {a}
""",
    "view": """
{a}.transpose(0, -1) | {a}.view(-1) | {a}.flatten(1) | {a}.unsqueeze(0) | {a}[:, ::2]
{a}[..., 1:] | {a}.unsqueeze(1).expand(-1, 2, *{a}.shape[1:])
{a}.permute(*range({a}.dim() - 1, -1, -1)) | {a}[0] | {a}.reshape({a}.shape[0], -1)
{a}.view(*{a}.shape[:-1], -1, 4) | {a}.narrow(0, 0, 1) | {a}.T | {a}.mT
{a}.reshape(-1, {a}.shape[-1]) | {a}.squeeze(0) | {a}.movedim(0, -1) | {a}.view_as({a}) | {a}.data
{a}.unflatten(-1, (-1, 2)) | {a}.diagonal() | {a}.chunk(2, -1)[1] | {a}.unbind(0)[0]
{a}.split(2, 0)[0] | {a}.view({a}.size(0), {a}.size(1), -1, 4, 4)
{a}.view({a}.size(0), -1, 4, 4) | {a}.expand(2, *{a}.shape)
""",
    "binary": """
{a} + {b} | {a} * {b} | {a} - {b} | torch.maximum({a}, {b}) | torch.cat([{a}, {b}], -1)
{a} @ {b} | torch.stack([{a}, {b}]) | torch.where({a} > {b}, {a}, {b}) | {a} / ({b}.abs() + 1)
torch.cat(({a}, {b}), 0) | torch.matmul({a}, {b}.transpose(-1, -2))
{a} * {b}.mean(-1, keepdim=True) | {a} + {b}.detach() | F.linear({a}, {b})
torch.einsum('bij,bkj->bik', {a}, {b}) | {a}.where({b} > 0, {b}) | {a} * {b}.sigmoid()
torch.addmm({a}, {a}, {b}) | {a}.lerp({b}, 0.5) | {a}.expand_as({b}) + {b} | {a} + {b} + {a}
""",
    "in_place": """
{a}.relu_() | {a}.mul_(2) | {a}.add_(1) | F.relu({a}, inplace=True) | {a}.clamp_(0)
{a}.add_({b}) | {a}.masked_fill_({a} > 0, 0.5) | {a}.mul_({b}) | F.silu({a}, inplace=True)
{a}.copy_({b}) | {a}.zero_() | F.dropout({a}, 0.1, self.training, inplace=True) | {a}.t_()
{a}.sub_({b}.detach()) | {a}.div_(2) | F.leaky_relu({a}, inplace=True) | {a}.sigmoid_()
{a}.fill_(1.0) | {a}.unsqueeze_(0) | {a}.tanh_()
""",
    "statement": """
{a}[..., :1] = 0 | {a}[:, 1:] = {a}[:, 1:] * 2 | {a}[0] = {b}[0] | {a}[..., 0].add_(1) | {a} += 1
{a} *= {b} | {new} = {a}.clone(); {new}[..., 0] = {b}[..., 0] | {new}, *_ = {a}.chunk(2, -1)
{new}, {new}_rest = {a}.split([1, {a}.shape[-1] - 1], -1) | {new}, {new}_at = {a}.max(-1)
xs.append({a}) | xs.append({a} * 2) | {new} = torch.cat(xs, -1) | {new} = sum(xs) | xs.clear()
{new} = xs.pop() | {new} = torch.stack(xs) | {new} = [{a}, {b}]; {new} = {new}[0] * {new}[1]
{new} = {a}; {new} = {new} * 2; {new} = F.relu({new})
{new} = {a}.chunk(2, 0); {new} = {new}[0] + {new}[1]
{new} = {a}.unbind(-1); {new} = torch.stack({new}[::2], -1) | {new} = {a} * self.scale
{a} = {a} * 2 | {new} = {a} + self.table[:{a}.shape[-1]]
{new} = self.table.unsqueeze(0) * {a}.sum() | self.steps.add_(1)
{new} = self.scale.expand_as({a}) * {a} | {a} = F.gelu({a}) | {a} = {a} + F.relu({a})
{a} = {a}.flatten(1) | {new} = F.linear({a}, self.table.t()) | {new} = F.linear({a}, self.table)
{new} = self.table[self.index] | {new} = F.embedding(self.index, self.table)
{new} = {a} @ self.table | {new} = {a} @ self.table.t()
{new} = checkpoint(lambda t: torch.tanh(t * self.scale) * 2, {a}, use_reentrant=False)
{new} = checkpoint(helper, {a}, use_reentrant=False)
{new} = checkpoint(helper, {a}, use_reentrant=True) | self.kept = {a}.detach()
self.kept = {a}.detach() * 2 | {new} = {a} * len(xs)
{new} = F.relu({a}) if {a}.dim() > 2 else {a}
""",
}
TEMPLATES = {
    kind: [t.strip() for t in text.replace("\n", "|").split("|") if t.strip()]
    for kind, text in _TEMPLATES.items()
}

MODULES: dict[str, Callable[[torch.Size], str | None]] = {
    "linear": lambda s: f"nn.Linear({s[-1]}, 16)",
    "plain_linear": lambda s: f"nn.Linear({s[-1]}, {s[-1]}, bias=False)",
    "norm": lambda s: f"nn.LayerNorm({s[-1]})",
    "rms": lambda s: f"nn.RMSNorm({s[-1]})",
    "batch1": lambda s: f"nn.BatchNorm1d({s[1]})" if len(s) in (2, 3) else None,
    "batch2": lambda s: f"nn.BatchNorm2d({s[1]})" if len(s) == 4 else None,
    "group": lambda s: f"nn.GroupNorm(1, {s[1]})" if len(s) > 1 else None,
    "instance": lambda s: f"nn.InstanceNorm1d({s[1]}, affine=True)" if len(s) == 3 else None,
    "conv1": lambda s: f"nn.Conv1d({s[1]}, 8, 3, padding=1)" if len(s) == 3 else None,
    "conv2": lambda s: f"nn.Conv2d({s[1]}, 8, 3, padding=1)" if len(s) == 4 else None,
    "transposed": lambda s: f"nn.ConvTranspose2d({s[1]}, 8, 2)" if len(s) == 4 else None,
    "prelu": lambda s: "nn.PReLU()",
    "relu": lambda s: "nn.ReLU(inplace=True)",
    "dropout": lambda s: "nn.Dropout(0.2)",
    "gelu": lambda s: "nn.GELU()",
    "attention": lambda s: (
        f"nn.TransformerEncoderLayer({s[-1]}, 2, 24, batch_first=True)"
        if len(s) == 3 and s[-1] % 2 == 0
        else None
    ),
    "block": lambda s: f"nn.Sequential(nn.Linear({s[-1]}, 24), nn.ReLU(), nn.Linear(24, {s[-1]}))",
}


def helper(x: torch.Tensor) -> torch.Tensor:
    """A function with locals of its own, that live until it returns."""
    wide = torch.cat([x, x], -1)
    half = wide[..., : x.shape[-1]].sigmoid()
    return half * x + 1


@dataclass(frozen=True)
class Program:
    """The source of a module and of its inputs."""

    modules: tuple[tuple[str, bool], ...]
    statements: tuple[str, ...]
    output: str
    inputs: tuple[Spec, ...]
    frozen_table: bool = False

    @property
    def source(self) -> str:
        """A module of Python source with one class, ``Generated``."""
        lines = ["class Generated(nn.Module):", "    def __init__(self):"]
        body = [
            "super().__init__()",
            "self.scale = nn.Parameter(torch.ones(1))",
            "self.table = nn.Parameter(torch.randn(16, 16))",
            f"self.table.requires_grad_({not self.frozen_table})",
            "self.register_buffer('index', torch.tensor([0, 1, 1, 0]))",
            "self.register_buffer('steps', torch.zeros(3))",
        ]
        for i, (module, frozen) in enumerate(self.modules):
            body.append(f"self.m{i} = {module}")
            if frozen:
                body.append(f"self.m{i}.requires_grad_(False)")
        lines += [f"        {line}" for line in body]
        names = ", ".join(f"x{i}" for i in range(len(self.inputs)))
        lines += ["", f"    def forward(self, {names}):", "        xs = []"]
        lines += [f"        {line}" for line in self.statements]
        return "\n".join([*lines, f"        return {self.output}", ""])

    def build(self) -> nn.Module:
        """The module, on whatever device is the default."""
        source = self.source
        file = FILE.format(zlib.crc32(source.encode()))
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        namespace = dict(NAMESPACE)
        exec(compile(source, file, "exec"), namespace)
        return namespace["Generated"]()  # type: ignore[no-any-return]

    def case(self) -> Case:
        """The program as a benchmark case, for the independent measurements."""
        return Case("generated", self.build, self.inputs)


NAMESPACE: dict[str, Any] = {
    "__name__": "generated_module",
    "torch": torch,
    "nn": nn,
    "F": F,
    "checkpoint": checkpoint,
    "Scaled": Scaled,
    "helper": helper,
}


class _Writer:
    """Draws statements, and keeps those that PyTorch accepts on meta tensors."""

    def __init__(self, draw: Callable[..., Any], inputs: Sequence[Spec]) -> None:
        self.draw = draw
        self.inputs = tuple(inputs)
        self.modules: list[tuple[str, bool]] = []
        self.statements: list[str] = []
        self.names = [f"x{i}" for i in range(len(inputs))]
        self.scope: dict[str, Any] = {**NAMESPACE, "xs": []}
        with torch.device("meta"):
            self.owner = Program((), (), "None", ()).build()
            for name, spec in zip(self.names, inputs, strict=True):
                tensor = torch.empty(spec.shape, dtype=spec.dtype)
                self.scope[name] = tensor.requires_grad_(spec.requires_grad)
        self.scope["self"] = self.owner

    def pick(self) -> str:
        """A tensor, the recent ones first as Hypothesis shrinks to zero."""
        return self.names[-1 - self.draw(st.integers(0, len(self.names) - 1))]

    def write(self) -> None:
        """Draws one statement, and drops it if it does not run."""
        kind = self.draw(st.sampled_from(KINDS))
        a, b, new = self.pick(), self.pick(), f"t{len(self.statements)}"
        if kind == "module":
            self._write_module(a, new)
        elif kind == "del":
            if len(self.names) > 2:
                self._try(f"del {a}")
        else:
            template = self.draw(st.sampled_from(TEMPLATES[kind]))
            text = template.format(a=a, b=b, new=new)
            self._try(text if kind in ("in_place", "statement") else f"{new} = {text}")

    def _write_module(self, a: str, new: str) -> None:
        reused = self.draw(st.booleans())
        if reused and self.modules:
            at = self.draw(st.integers(0, len(self.modules) - 1))
            self._try(f"{new} = self.m{at}({a})")
            return
        shape = self.scope[a].shape
        make = MODULES[self.draw(st.sampled_from(sorted(MODULES)))]
        module = make(shape) if len(shape) > 1 else None
        if module is None:
            return
        # torch computes views of a constant of one element on its value, in a storage of their own.
        frozen = module != "nn.PReLU()" and self.draw(st.integers(0, 5)) == 5
        name = f"m{len(self.modules)}"
        with torch.device("meta"):
            setattr(self.owner, name, eval(module, NAMESPACE).requires_grad_(not frozen))
        self.modules.append((module, frozen))
        if not self._try(f"{new} = self.{name}({a})"):
            self.modules.pop()
            delattr(self.owner, name)

    def _try(self, text: str) -> bool:
        saved = dict(self.scope), list(self.scope["xs"])
        try:
            with torch.device("meta"):
                exec(text, self.scope)
        except Exception:
            self.scope, self.scope["xs"] = saved
            return False
        new = [k for k, v in self.scope.items() if isinstance(v, torch.Tensor)]
        tensors = [self.scope[name] for name in new]
        if any(t.numel() > MAX_NUMEL or not t.numel() for t in tensors):
            self.scope, self.scope["xs"] = saved
            return False
        self.names = [n for n in self.names if n in new] + [n for n in new if n not in self.names]
        self.statements.append(text)
        return True


KINDS = ["unary"] * 4 + ["module"] * 3 + ["view"] * 2 + ["binary"] * 2
KINDS += ["in_place", "statement", "statement", "del"]
SHAPES = [(4, 16), (2, 8, 16), (4, 6, 8, 8), (3, 16, 16)]


@st.composite
def programs(draw: Callable[..., Any], most: int = 24) -> Program:
    """Programs that run forward and backward."""
    inputs = [
        Spec(draw(st.sampled_from(SHAPES)), requires_grad=draw(st.integers(0, 3)) == 3)
        for _ in range(draw(st.integers(1, 2)))
    ]
    writer = _Writer(draw, inputs)
    for _ in range(draw(st.integers(most // 2, most))):
        writer.write()
    names = list(dict.fromkeys(writer.pick() for _ in range(draw(st.integers(1, 3)))))
    text = names[0]
    if len(names) > 1:
        named = ", ".join(f"'{name}': {name}" for name in names)
        outputs = [f"({', '.join(names)})", f"[{names[0]}, {names[1]}]", f"{{{named}}}"]
        text = draw(st.sampled_from(outputs))
    if not any(writer.scope[name].requires_grad for name in names):
        text = f"({names[0]}, (self.scale * {names[0]}))"
    return Program(
        tuple(writer.modules),
        tuple(writer.statements),
        text,
        writer.inputs,
        draw(st.booleans()),
    )


def runs(program: Program) -> bool:
    """Tells whether PyTorch takes the step, and again with inputs whose shape the first changed.

    Some in-place writes it refuses only in backward.
    """
    torch.manual_seed(0)
    model = program.build()
    args, _ = program.case().inputs()
    try:
        for _ in range(2):
            default_loss(model(*args)).backward()
    except (RuntimeError, ValueError, IndexError):
        return False
    return True
