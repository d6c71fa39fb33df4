"""Pretrained models of transformers: with weights, and with their configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fxmem
from benchmarks.cases import import_torchvision
from fxmem.errors import LoadError
from fxmem.scripts.recording import Recording

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "dtype": "bfloat16",
}


@pytest.fixture(params=["Llama", "Mixtral"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A model as ``save_pretrained`` writes it, and its configuration alone."""
    import_torchvision()
    import transformers

    config: Any = getattr(transformers, f"{request.param}Config")(**SIZES)
    model = getattr(transformers, f"{request.param}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "whole")
    config.architectures = model.config.architectures
    config.save_pretrained(tmp_path / "config")
    return tmp_path / "whole", tmp_path / "config"


def load_and_train(folder: Path, **options: Any) -> Recording:
    with fxmem.record(gpu="a100-80gb", steps=2) as recording:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, device_map="cuda", **options)
        assert model.device.type == "cuda" and model.config.name_or_path == str(folder)
        inputs = torch.ones(1, 64, device="cuda")
        trained = [p for p in model.parameters() if p.is_floating_point()]
        optimizer = torch.optim.SGD(trained)
        for _ in range(2):
            model(input_ids=inputs.long(), labels=inputs.long()).loss.backward()
            optimizer.step()
    return recording


def find_loading(recording: Recording) -> int:
    loading = recording.run.loading
    assert loading is not None
    return loading.peak_bytes


def test_weights_that_are_missing_take_what_real_ones_take(folders: tuple[Path, Path]) -> None:
    whole, config = (load_and_train(folder) for folder in folders)
    assert [step.peak_bytes for step in config.steps] == [step.peak_bytes for step in whole.steps]
    assert find_loading(config) == find_loading(whole)  # with experts one by one
    note = f"No weights of {folders[1]} are here: they were made as its configuration says."
    assert note in config.notes and not [text for text in whole.notes if "weights" in text]


def test_what_a_run_has_saved_is_loaded(tmp_path: Path) -> None:
    import_torchvision()
    with fxmem.record(gpu="a100-80gb", steps=1) as recording:
        from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

        saved: Any = LlamaForCausalLM(LlamaConfig(**SIZES)).cuda()
        saved.save_pretrained(tmp_path / "saved")
        loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", device_map="cuda")
        layouts = [
            {name: (weight.shape, weight.dtype, weight.is_cuda) for name, weight in each.items()}
            for each in (saved.state_dict(), loaded.state_dict())
        ]
        assert layouts[0] == layouts[1]
    assert any(note.startswith("safetensors at ") for note in recording.notes)
    assert not (tmp_path / "saved" / "model.safetensors").exists()


@pytest.mark.parametrize("folders", ["Llama"], indirect=True)
def test_weights_that_are_missing_are_quantized_as_they_load(folders: tuple[Path, Path]) -> None:
    from transformers import BitsAndBytesConfig

    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    whole, config = (load_and_train(folder, quantization_config=packing) for folder in folders)
    assert config.peak.nbytes == whole.peak.nbytes
    assert find_loading(config) == find_loading(whole)


@pytest.mark.parametrize("folders", ["Llama"], indirect=True)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_target_may_be_a_pretrained_model_that_is_quantized(
    folders: tuple[Path, Path], bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    (tmp_path / "net.py").write_text(
        "from transformers import AutoModelForCausalLM, BitsAndBytesConfig\n"
        f"packing = BitsAndBytesConfig(load_in_{bits}bit=True)\n"
        "options = {'quantization_config': packing, 'dtype': 'auto', 'device_map': 'cuda'}\n"
        f"def net(): return AutoModelForCausalLM.from_pretrained('{folders[1]}', **options)\n"
    )
    monkeypatch.chdir(tmp_path)
    inputs = {"input_ids": "1x64:int64"}
    found = fxmem.analyze("net.py:net", kwargs=inputs, mode="infer", gpu="a100-80gb")
    packing = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    with fxmem.record(gpu="a100-80gb"):
        model: Any = AutoModelForCausalLM.from_pretrained(
            folders[0], quantization_config=packing, device_map="cuda"
        )
        tokens = torch.ones(1, 64, dtype=torch.int64, device="cuda")
        with torch.no_grad():
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                result = model(input_ids=tokens, use_cache=True)
                peak = torch.cuda.max_memory_allocated()
                del result
    assert found.peak_bytes == peak


@pytest.mark.parametrize("folders", ["Llama"], indirect=True)
def test_weights_that_are_quantized_already_are_refused(folders: tuple[Path, Path]) -> None:
    from transformers import AutoConfig, BitsAndBytesConfig

    config = AutoConfig.from_pretrained(folders[1])
    config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    config.save_pretrained(folders[1])
    with pytest.raises(LoadError, match=r"no weights of .* are here, and they are quantized"):
        load_and_train(folders[1])


@pytest.mark.parametrize("folders", ["Llama"], indirect=True)
def test_releases_that_find_weights_elsewhere_need_them(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers 4.49 does; that of the test has lost the function, and fails."""
    from transformers import modeling_utils

    monkeypatch.delattr(modeling_utils, "_get_resolved_checkpoint_files")
    with pytest.raises(NameError, match="_get_resolved_checkpoint_files"):
        load_and_train(folders[1])


def test_weights_on_the_host_count_where_the_host_is_the_target(
    folders: tuple[Path, Path],
) -> None:
    import transformers

    with fxmem.record(device="cpu", steps=1) as recording:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folders[0])
        trained = [p for p in model.parameters() if p.is_floating_point()]
        optimizer = torch.optim.SGD(trained)
        inputs = torch.ones(1, 16, dtype=torch.int64)
        model(input_ids=inputs, labels=inputs).loss.backward()
        optimizer.step()
    assert recording.steps[0].parameter_bytes == sum(each.nbytes for each in trained)
