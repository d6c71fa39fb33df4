"""Models whose step is more than their modules: hooks, closures, globals, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 48
GLOBALS: dict[str, Any] = {}


def forget_globals() -> None:
    """Lets go of what an earlier build left in this module."""
    GLOBALS.clear()


Build = Callable[[], nn.Module]
BUILDERS: dict[str, Build] = {}


def builder(build: Build) -> Build:
    """Registers a model under the name of the function that builds it."""
    BUILDERS[build.__name__] = build
    return build


def make_mlp(layers: int = 3) -> nn.Sequential:
    """Linear layers with an activation after each."""
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*(module for pair in pairs for module in pair))


def hook_gradients(model: nn.Module, update: Callable[[Any], object]) -> nn.Module:
    """Has a function called with each parameter once its gradient is there."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return model


def make_optimizers(model: nn.Module) -> dict[Any, torch.optim.Optimizer]:
    """One optimizer for each parameter, by parameter."""
    return {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}


# -- an optimizer in backward ----------------------------------------------------------------------


@builder
def drops_gradients() -> nn.Module:
    return hook_gradients(make_mlp(), lambda p: setattr(p, "grad", None))


@builder
def steps_from_a_closure() -> nn.Module:
    model = make_mlp()
    optimizers = make_optimizers(model)

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    return hook_gradients(model, update)


# -- hooks that see or change gradients ------------------------------------------------------------


@builder
def masks_gradients() -> nn.Module:
    model = make_mlp()
    for parameter in model.parameters():
        mask = torch.ones_like(parameter)
        parameter.register_hook(lambda grad, mask=mask: grad * mask)
    return model


@builder
def records_gradients() -> nn.Module:
    model = make_mlp()
    kept: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: kept.append(grad.clone()))
    return model


@builder
def waits_for_all_gradients() -> nn.Module:
    model, kept = make_mlp(), {}

    def keep(gradients: Any) -> None:
        kept["norm"] = [gradient.clone() for gradient in gradients]

    torch.autograd.graph.register_multi_grad_hook([*model.parameters()], keep)
    return model


class Gated(nn.Module):
    """A buffer that requires grad, with a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("gate", torch.ones(WIDTH, WIDTH, requires_grad=True))
        self.gate.register_hook(lambda grad: torch.cat([grad, grad])[:WIDTH])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) @ self.gate
        return result


BUILDERS["hooks_a_buffer"] = Gated


# -- hooks on modules ------------------------------------------------------------------------------


@builder
def keeps_activations() -> nn.Module:
    model, kept = make_mlp(), {}
    for index, module in enumerate(model):
        module.register_forward_hook(
            lambda module, args, output, index=index: kept.update({index: output.detach().clone()})
        )
    return model


@builder
def changes_what_modules_see() -> nn.Module:
    model = make_mlp()
    for module in model:
        module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        module.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,))
        module.register_full_backward_hook(lambda module, grads, outputs: None)
    return model


@builder
def calls_a_neighbour() -> nn.Module:
    model = make_mlp()
    for here, there in zip(model[0:4:2], model[2:6:2], strict=True):
        here.register_forward_hook(lambda module, args, y, there=there: y + there(y))
    return model


# -- tensors that no module registers --------------------------------------------------------------


@builder
def patches_forward() -> nn.Module:
    """A low-rank adapter on a frozen layer."""
    model = make_mlp()
    for module in model:
        if isinstance(module, nn.Linear):
            module.weight.requires_grad_(False)
            module.down = nn.Parameter(torch.randn(WIDTH, 4))
            module.up = nn.Parameter(torch.randn(4, WIDTH))
            forward, held = module.forward, module

            def adapted(x: Tensor, forward: Any = forward, held: Any = held) -> Tensor:
                result: Tensor = forward(x) + x @ held.down @ held.up
                return result

            module.forward = adapted
    return model


class Applies(nn.Module):
    """Applies a function to what a linear layer returns."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


@builder
def lists_modules() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return Applies(run)


class KeepsViews(nn.Module):
    """An autoencoder whose decoder is its encoder's weight, turned, and a stack that it cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 8)
        self.decoder = self.encoder.weight.t()
        self.stack = nn.Parameter(torch.randn(2, WIDTH * WIDTH))
        self.first = self.stack[0].view(WIDTH, WIDTH)
        self.second = self.stack[1].view(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ self.first).relu() @ self.second
        return self.encoder(x) @ self.decoder.t()


BUILDERS["keeps_views"] = KeepsViews


class UsesGlobal(nn.Module):
    """Multiplies by a global, which no copy of the model reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = GLOBALS["layer"](self.linear(x) @ GLOBALS["weight"])
        return result


@builder
def uses_globals() -> nn.Module:
    GLOBALS["weight"] = torch.randn(WIDTH, WIDTH)
    GLOBALS["layer"] = nn.Linear(WIDTH, WIDTH)
    return UsesGlobal()


class Kept(nn.Parameter):
    """A parameter of a class of its own."""


class Asks(nn.Module):
    """Takes another way where its parameter is none of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Kept(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if isinstance(self.weight, Kept) else x.exp() @ self.weight


BUILDERS["asks_for_a_class"] = Asks


@builder
def has_gradients_already() -> nn.Module:
    model = make_mlp()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    held: Any = model
    held.spare = [nn.Parameter(torch.ones(WIDTH, WIDTH))]
    held.spare[0].grad = torch.ones(WIDTH, WIDTH)
    return model
