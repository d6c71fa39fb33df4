"""LSTM layers on oneDNN: weights in blocked layouts, scratchpad and training workspace.

Follows ``aten/src/ATen/native/mkldnn/RNN.cpp`` (``mkldnn_rnn_layer`` and its backward) and
``ideep/operators/lstm.hpp``. oneDNN itself answers which layouts a problem takes; where it cannot
be asked only the sum of the biases is counted.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from fxmem.kernels.cpu.onednn import library as onednn
from fxmem.kernels.registry import CPU, OperatorCall, as_tensor
from fxmem.kernels.workspace import PeakTrace, dense_bytes, size_bytes

# oneapi/dnnl/dnnl_types.h
_LEFT_TO_RIGHT, _RIGHT_TO_LEFT = 1, 2
_ARG_WEIGHTS, _ARG_DIFF_WEIGHTS = 33, 161
_GATES = 4
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class _Problem:
    steps: int
    batch: int
    features: int
    hidden: int
    reverse: bool
    training: bool
    dtype: torch.dtype
    threads: int


@dataclass(frozen=True)
class _Needs:
    weights_bytes: int = 0
    gradients_bytes: int = 0
    scratchpad_bytes: int = 0
    workspace_bytes: int = 0


def _problem(input_: Tensor, hidden: Tensor, reverse: object, training: bool) -> _Problem:
    steps, batch, features = input_.shape
    return _Problem(
        steps, batch, features, hidden.shape[-1], bool(reverse), training, input_.dtype,
        torch.get_num_threads(),
    )  # fmt: skip


class _Descriptors:
    """Memory descriptors in the order that oneDNN's LSTM takes them."""

    def __init__(self, scope: onednn.Scope, problem: _Problem) -> None:
        self.scope, self.problem = scope, problem
        self.direction = ctypes.c_int(_RIGHT_TO_LEFT if problem.reverse else _LEFT_TO_RIGHT)
        self.weight_sizes = [
            (1, 1, size, _GATES, problem.hidden) for size in (problem.features, problem.hidden)
        ]

    def _dense(self, dtype: torch.dtype, *sizes: int) -> ctypes.c_void_p:
        return self.scope.memory(sizes, dtype, make_contiguous_strides_for(sizes))

    def operands(self, dtype: torch.dtype) -> list[ctypes.c_void_p]:
        """Everything that one pass reads and writes, in one type.

        The input, both states, the weights in the layouts that oneDNN chooses, no peephole
        weights and no projection, the bias; the output and both states after the last step.
        """
        problem, null = self.problem, ctypes.c_void_p()
        state = self._dense(dtype, 1, 1, problem.batch, problem.hidden)
        return [
            self._dense(dtype, problem.steps, problem.batch, problem.features), state, state,
            *(self.scope.memory(sizes, dtype) for sizes in self.weight_sizes), null, null,
            self._dense(dtype, 1, 1, _GATES, problem.hidden),
            self._dense(dtype, problem.steps, problem.batch, problem.hidden), state, state,
        ]  # fmt: skip

    def forward(self) -> ctypes.c_void_p:
        """The forward primitive."""
        kind = onednn.FORWARD_TRAINING if self.problem.training else onednn.FORWARD_INFERENCE
        return self.scope.primitive(
            "lstm_forward", ctypes.c_int(kind), self.direction,
            *self.operands(self.problem.dtype),
            ctypes.c_uint(0), self.scope.library.attributes,
        )  # fmt: skip

    def backward(self) -> ctypes.c_void_p:
        """The backward primitive; gradients are float, whatever the type of the operands is."""
        return self.scope.primitive(
            "lstm_backward", ctypes.c_int(onednn.BACKWARD), self.direction,
            *self.operands(self.problem.dtype), *self.operands(torch.float32),
            ctypes.c_uint(0), self.forward(), self.scope.library.attributes,
        )  # fmt: skip

    def needs(self, primitive: ctypes.c_void_p) -> _Needs:
        """Asks for a pass's reordered weights, gradients, scratchpad and workspace."""
        library, hidden, weights_bytes = self.scope.library, self.problem.hidden, 0
        for index, sizes in enumerate(self.weight_sizes):
            inner = sizes[2]  # PyTorch's order is gate, output, input (``ldgoi``)
            whole = _GATES * hidden * inner
            strides = (whole, whole, 1, hidden * inner, inner)
            user = self.scope.memory(sizes, self.problem.dtype, strides)
            wanted = library.query(primitive, onednn.QUERY_ARGUMENT, _ARG_WEIGHTS + index)
            weights_bytes += 0 if library.equal(user, wanted) else library.size_bytes(wanted)
        gradients = (
            library.query(primitive, onednn.QUERY_ARGUMENT, _ARG_DIFF_WEIGHTS + index)
            for index in range(2)
        )
        scratchpad, workspace = (
            library.size_bytes(library.query(primitive, what))
            for what in (onednn.QUERY_SCRATCHPAD, onednn.QUERY_WORKSPACE)
        )
        gradients_bytes = sum(map(library.size_bytes, gradients))
        return _Needs(weights_bytes, gradients_bytes, scratchpad, workspace)


@functools.lru_cache(maxsize=2048)
def _find_needs(problem: _Problem, backward: bool) -> _Needs:
    """Asks for a pass's primitive; the weights' gradients are made in its layouts."""

    def question(scope: onednn.Scope) -> _Needs:
        descriptors = _Descriptors(scope, problem)
        return descriptors.needs(descriptors.backward() if backward else descriptors.forward())

    return onednn.ask(question, _Needs())


def find_reserve_bytes(input_: Tensor, hidden: Tensor, reverse: object) -> int:
    """Finds the bytes that a training forward hands to its backward; 0 if oneDNN is not asked."""
    return _find_needs(_problem(input_, hidden, reverse, True), backward=False).workspace_bytes


@CPU.workspace("mkldnn_rnn_layer")
def _layer(call: OperatorCall) -> int:
    """RNN.cpp, ``mkldnn_rnn_layer``: the sum of the biases, and what the primitive needs.

    It trains if gradients are enabled, whatever the module's mode is.
    """
    input_, hidden = call.tensor(0), call.tensor(5)
    problem = _problem(input_, hidden, call.args[7], torch.is_grad_enabled())
    needs = _find_needs(problem, backward=False)
    biases = _GATES * problem.hidden * input_.element_size()
    return dense_bytes(input_) + biases + needs.weights_bytes + needs.scratchpad_bytes


@CPU.workspace("mkldnn_rnn_layer_backward")
def _layer_backward(call: OperatorCall) -> int:
    """RNN.cpp, ``mkldnn_rnn_layer_backward``; ``ideep::lstm_backward::compute``.

    Zeros for missing gradients, contiguous copies of others, the sum of the biases; float copies
    of gradients that are not; gradients of weights and biases in the primitive's layouts, then
    copied. All gradients made are float. The second bias's is a clone that is made at the end.
    """
    input_, hidden = call.tensor(0), call.tensor(5)
    problem = _problem(input_, hidden, call.args[13], True)
    needs = _find_needs(problem, backward=True)
    biases = _GATES * problem.hidden
    bias_gradient_bytes = biases * _FLOAT_BYTES
    trace = PeakTrace()
    for grad, like in zip(call.args[10:13], call.args[7:10], strict=True):
        if not isinstance(grad, Tensor) or not grad.is_contiguous():
            trace.allocate(size_bytes(as_tensor(like)))
        if input_.dtype is not torch.float32:
            trace.allocate(as_tensor(like).numel() * _FLOAT_BYTES)
    cell = call.tensor(6)
    if cell.untyped_storage()._cdata == hidden.untyped_storage()._cdata:
        trace.allocate(size_bytes(cell))  # one tensor as both states: the second is cloned
    trace.allocate(biases * input_.element_size())
    trace.allocate(needs.weights_bytes + needs.gradients_bytes + bias_gradient_bytes)
    trace.allocate(needs.scratchpad_bytes)
    return trace.peak_bytes - bias_gradient_bytes
