"""The private interfaces of torch that fxmem relies on."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from typing import Any

from fxmem.versions.patches import PATCHES, Interface
from fxmem.versions.release import Release, is_release


def _list(
    owner: str,
    names: str,
    purpose: str,
    replacement: str,
    since: Release | None = None,
    before: Release | None = None,
) -> Interface:
    return Interface(owner, tuple(names.split()), purpose, replacement, since, before)


def _list_compiler(owner: str, names: str) -> Interface:
    """Lists names without which nothing is compiled; to import them takes long."""
    purpose = "lower compiled code for a GPU that is not there"
    return Interface(owner, tuple(names.split()), purpose, "none", is_optional=True)


INTERFACES = (
    _list(
        "torch._subclasses.fake_tensor",
        "FakeTensor FakeTensorMode is_fake DataDependentOutputException"
        " DynamicOutputShapeException UnsupportedFakeTensorException UnsupportedOperatorException"
        " in_kernel_invocation_manager",
        "run a step without memory",
        "none: torch.export, which is public, runs on them too",
    ),
    _list(
        "torch.Tensor",
        "_make_subclass _is_view _view_func_unsafe _use_count _version _base _cdata",
        "make fake tensors of seen results; tell views and who holds a tensor",
        "make each result by its fake kernel, which is slower; none for the rest",
    ),
    _list(
        "torch._C",
        "_set_throw_on_mutable_data_ptr _set_warn_deprecated_on_mutable_data_ptr",
        "have fake tensors refuse to show memory, as PyTorch's own do",
        "make each result by its fake kernel, which is slower",
    ),
    _list(
        "torch._C",
        "DisableTorchFunction _DisableTorchDispatch _disabled_torch_function_impl"
        " _get_dispatch_mode _TorchDispatchModeKey",
        "keep fxmem's own calls out of the recording",
        "torch.overrides.BaseTorchFunctionMode, for some of them",
    ),
    _list(
        "torch.utils._python_dispatch",
        "TorchDispatchMode is_traceable_wrapper_subclass _disable_current_modes"
        " _get_current_dispatch_mode_stack _push_mode _pop_mode _pop_mode_temporarily",
        "see each operator of a step; leave all modes for a moment; enter them in threads",
        "none: PyTorch's documentation names the first for this use",
    ),
    _list(
        "torch.overrides",
        "_get_current_function_mode_stack _pop_mode_temporarily _push_mode _pop_mode",
        "enter the modes of a script in its threads, and leave them for an analysis within",
        "pass each mode on by hand",
    ),
    _list(
        "torch.cpu",
        "_is_amx_tile_supported",
        "tell whether attention packs its operands for the processor's tiles",
        "the processor's flags, from the operating system",
    ),
    _list("torch.utils._mode_utils", "no_dispatch", "work on what a fake tensor wraps", "none"),
    _list(
        "torch.utils._pytree",
        "TreeSpec tree_flatten tree_unflatten tree_flatten_with_path tree_iter tree_leaves tree_map"
        " tree_map_only keystr",
        "walk nested inputs and outputs",
        "torch.utils.pytree or the library optree",
    ),
    _list(
        "torch._ops",
        "OpOverload",
        "name the type of an operator",
        "type(torch.ops.aten.add.Tensor)",
    ),
    _list(
        "torch._C",
        "_current_autograd_node _is_multithreading_enabled _storage_Use_Count _set_grad_enabled"
        " _WeakTensorRef",
        "tell which function of backward runs, and where autograd adds gradients in place",
        "none",
    ),
    _list(
        "torch._C._autograd",
        "_get_sequence_nr _saved_tensors_hooks_is_enabled _pop_saved_tensors_default_hooks"
        " _push_saved_tensors_default_hooks",
        "match functions of backward with operators of forward; know whether hooks are allowed",
        "the profiler's sequence numbers, for the first",
    ),
    _list(
        "torch._C._autograd",
        "_top_saved_tensors_default_hooks",
        "see hooks of saved tensors that a part of a model runs under",
        "none: before, such a part is analysed but not planned apart",
        since=(2, 8),
    ),
    _list(
        "torch._C._autograd",
        "_make_saved_tensor",
        "keep a segment's inputs as autograd keeps them",
        "before, a torch.autograd.Function that saves them",
        since=(2, 12),
    ),
    _list(
        "torch._C",
        "_swap_tensor_impl",
        "keep a script's parameters the same objects when they move to the GPU",
        "torch.utils.swap_tensors, without weak references to them",
    ),
    _list(
        "torch.autograd.graph",
        "_get_grad_fn_or_grad_acc",
        "find where hooks of a parameter's gradient hang",
        "torch.autograd.graph.get_gradient_edge",
    ),
    _list(
        "torch._C._functorch",
        "peek_interpreter_stack get_unwrapped is_functorch_wrapped_tensor",
        "know that torch.func transforms a call, which has no checkpoints, or what it wraps",
        "none",
    ),
    _list(
        "torch._C",
        "DispatchKey DispatchKeySet _IncludeDispatchKeyGuard _ExcludeDispatchKeyGuard"
        " _SetExcludeDispatchKeyGuard"
        " _AutoDispatchBelowAutograd _dispatch_get_all_op_names"
        " _dispatch_has_kernel_for_dispatch_key _dispatch_tls_is_dispatch_key_included"
        " _is_any_autocast_enabled",
        "run CUDA's autocast where there is no GPU",
        "torch.library.register_autocast, one operator at a time",
    ),
    _list(
        "torch._C",
        "_ConvBackend _select_conv_backend _get_mkldnn_enabled _get_nnpack_enabled"
        " _get_sdp_priority_order _get_flash_sdp_enabled _get_mem_efficient_sdp_enabled"
        " _get_math_sdp_enabled"
        " _get_cudnn_sdp_enabled _get_cudnn_enabled _get_deterministic_algorithms"
        " _get_float32_matmul_precision",
        "ask which kernel PyTorch takes",
        "torch.backends, for most of the settings",
    ),
    _list(
        "torch",
        "_fused_sdp_choice _safe_softmax _native_multi_head_attention _masked_softmax"
        " _transform_bias_rescale_qkv _transformer_encoder_layer_fwd _addmm_activation _cudnn_rnn"
        " _pad_packed_sequence",
        "run attention, transformer layers and recurrent layers as a GPU does",
        "none: public functions call them",
    ),
    _list(
        "torch._prims_common",
        "compute_elementwise_output_strides make_contiguous_strides_for"
        " make_channels_last_strides_for suggest_memory_format"
        " elementwise_dtypes ELEMENTWISE_TYPE_PROMOTION_KIND",
        "lay out results as TensorIterator does",
        "run the operator on meta tensors",
    ),
    _list(
        "torch._prims_common",
        "is_non_overlapping_and_dense_or_false",
        "tell whether a tensor fills its memory",
        "before, is_non_overlapping_and_dense",
        since=(2, 11),
    ),
    _list(
        "torch._prims_common",
        "is_non_overlapping_and_dense",
        "the same",
        "later, is_non_overlapping_and_dense_or_false",
        before=(2, 11),
    ),
    _list("torch._C", "TensorBase", "tell methods of tensors from functions", "torch.Tensor"),
    _list(
        "torch._meta_registrations",
        "_create_grouped_mm_output_tensor",
        "lay out the result of a grouped product",
        "the operator's fake kernel",
        since=(2, 8),
    ),
    _list(
        "torch.fx.graph",
        "_Namespace _format_target",
        "write segments as functions of a graph's code",
        "one submodule for each segment, by torch.fx.passes.split_module",
    ),
    _list("torch.fx.node", "_get_qualified_name", "write functions' names in code", "the same"),
    _list(
        "torch.fx.passes.shape_prop",
        "_extract_tensor_metadata",
        "set tensor_meta, as ShapeProp does",
        "run ShapeProp",
    ),
    _list(
        "torch.utils._device",
        "CURRENT_DEVICE _device_constructors",
        "build models on fake devices as torch.device's context does",
        "torch.get_default_device, for the first",
    ),
    _list(
        "torch.distributed.pipelining.PipelineStage",
        "forward_one_chunk forward_maybe_with_nosync backward_one_chunk backward_weight_one_chunk",
        "know what a pipeline's stage runs",
        "hooks on the stage's module, which do not tell the micro-batch",
    ),
    _list(
        "torch.distributed.pipelining.PipelineStage",
        "_warmup_forward_vote _warmup_backward_result",
        "have all stages of a pipeline take the metadata that they are told",
        "answer what a process receives from the others",
        since=(2, 12),
        before=(2, 15),
    ),
    _list(
        "torch.distributed.pipelining.schedules._PipelineSchedule",
        "_merge_outputs",
        "know when a pipeline's schedule is done, and merges results",
        "none: the merging is taken for a part of the last backward",
    ),
    _list(
        "torch._C._profiler",
        "_EventType",
        "measure a step's peak on the CPU, for verify",
        "the profiler's Chrome trace, a file",
    ),
    _list(
        "torch.testing._internal.distributed.fake_pg",
        "FakeStore",
        "be one rank of a process group whose other ranks are not there",
        "a process group of fxmem's own, by torch.distributed.Backend.register_backend",
    ),
    _list(
        "torch.distributed.tensor.DTensor",
        "_op_dispatcher",
        "forget the meshes of a group that is left",
        "none",
    ),
    _list(
        "torch._C",
        "_clear_DTensor_sharding_propagator_cache",
        "forget the meshes of a group that is left",
        "none",
        since=(2, 10),
    ),
    _list(
        "torch.distributed.tensor._redistribute",
        "_gen_transform_infos",
        "forget the meshes of a group that is left",
        "none",
    ),
    _list(
        "torch.ops._c10d_functional",
        "wait_tensor",
        "have it return its argument, as it does on real tensors",
        "a wait_tensor of fxmem's own",
    ),
    _list(
        "torch._C",
        "_distributed_c10d",
        "give collectives a future, for the reducer of DistributedDataParallel",
        "a communication hook that returns one",
    ),
    _list("torch._C._nn", "_parse_to", "read module.to(0)", "patch torch.nn.Module.to"),
    _list_compiler("torch._C", "_DisableAutocast"),
    _list_compiler("torch._dynamo.types", "FrameAction FrameExecStrategy ConvertFrameReturn"),
    _list_compiler("torch._inductor.fx_passes.joint_graph", "lazy_init"),
    _list_compiler("torch._inductor.compile_fx", "compile_fx compile_fx_inner"),
    _list_compiler("torch._C._ConvBackend", "Cudnn"),
    _list_compiler("torch._dynamo.external_utils", "wrap_inline"),
    _list_compiler("torch._inductor.select_algorithm", "extern_kernels"),
    _list_compiler("torch._inductor.runtime.hints.DeviceProperties", "create"),
    _list_compiler(
        "torch._dynamo.trace_rules",
        "SKIP_DIRS _recompile_re clear_lru_cache get_torch_obj_rule_map",
    ),
    _list_compiler(
        "torch._dynamo.variables.torch", "constant_fold_functions TorchInGraphFunctionVariable"
    ),
    _list_compiler("torch._dynamo.utils", "get_fake_value"),
    _list_compiler("torch._dynamo.eval_frame", "reset_code"),
    *PATCHES,
)


def find_missing() -> list[str]:
    """Finds the names in :data:`INTERFACES` that the installed torch should have, and has not.

    >>> find_missing()
    []
    """
    return [
        f"{interface.owner}.{name}"
        for interface in INTERFACES
        if is_release(interface.since, interface.before) and not interface.is_optional
        for name in _iterate_missing(interface)
    ]


def _iterate_missing(interface: Interface) -> Iterator[str]:
    owner = find_owner(interface.owner)
    for name in interface.names:
        if not hasattr(owner, name):
            yield name


def find_owner(path: str) -> Any:
    """Finds a module, or an attribute of one; None where there is neither."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None
