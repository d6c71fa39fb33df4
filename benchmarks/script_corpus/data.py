"""Data sets, tokenizers and models, made up where the scripts' own would be downloaded."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDS = (
    "O",
    "God,",
    "God!",
    "the",
    "a",
    "cat",
    "dog",
    "sees",
    "runs",
    "over",
    "under",
    "house",
    "tree",
    "and",
    "one",
)


def make_sentences(count: int, length: int = 12) -> list[str]:
    """Returns sentences of random words, the same in every run."""
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, length)) for _ in range(count)]


def _save_image(path: Path, size: int, rng: Any, mode: str = "RGB") -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size, size, 3) if mode == "RGB" else (size, size)
    high = 256 if mode == "RGB" else 2
    pixels = rng.integers(0, high, shape, dtype=np.uint8)
    Image.fromarray(pixels if high == 256 else pixels * 255).save(path)


def make_images(folder: Path) -> None:
    """Writes images in folders by class, in one folder, and masks."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("n01", "n02", "n03", "n04"):
            for at in range(16):
                _save_image(folder / split / label / f"{at}.png", 256, rng)
    for at in range(40):
        _save_image(folder / "flat" / f"{at}.png", 128, rng)
        _save_image(folder / "masks" / f"{at}.png", 128, rng, "L")
        for name in ("trainA", "trainB", "A", "B"):
            root = folder / "pairs" if len(name) > 1 else folder / "pairs" / "train"
            _save_image(root / name / f"{at}.jpg", 128, rng)
        _save_image(folder / "pets" / f"{'ab'[at % 2]}_{at}.jpg", 128, rng)
        _save_image(folder / "aligned" / "train" / f"{at}.jpg", 512, rng)


def make_captions(folder: Path) -> None:
    """Writes images with captions, as diffusers' scripts read them."""
    rng = np.random.default_rng(0)
    captions = make_sentences(40)
    for at in range(len(captions)):
        _save_image(folder / "train" / f"{at}.png", 64, rng)
    rows = ({"file_name": f"{at}.png", "text": text} for at, text in enumerate(captions))
    table = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train" / "metadata.jsonl").write_text(table)


def make_mnist(folder: Path, *counts: int) -> None:
    """Writes MNIST's files, with random digits, 2,048 each if no numbers are given."""
    rng = np.random.default_rng(0)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in zip(("train", "t10k"), counts or (2048, 2048), strict=True):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 2051, *images.shape) + images.tobytes()
        )
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 2049, len(labels)) + labels.tobytes()
        )
        processed = raw.parent / "processed" / ("training.pt" if split == "train" else "test.pt")
        processed.parent.mkdir(exist_ok=True)
        torch.save((torch.from_numpy(images), torch.from_numpy(labels).long()), processed)


def make_text(folder: Path) -> None:
    """Writes texts: plain, of characters, in the splits of a corpus, and rows in JSON and CSV."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = make_sentences(2000)
    text = "\n".join(lines) + "\n"
    for name in ("train", "valid", "test", "input"):
        (folder / f"{name}.txt").write_text(text)
    ids = np.array([ord(c) % 64 for c in text], dtype=np.uint16)
    for name in ("train", "val"):
        ids.tofile(folder / f"{name}.bin")
    with open(folder / "meta.pkl", "wb") as file:
        pickle.dump({"vocab_size": 64, "itos": {}, "stoi": {}}, file)
    with gzip.open(folder / "enwik8.gz", "wb", 1) as zipped:
        zipped.write(np.resize(np.frombuffer(text.encode(), np.uint8), 95_000_000).tobytes())
    hourly = np.random.default_rng(0).standard_normal((17420, 7)).round(3)
    hours = np.datetime64("2016-07-01T00") + np.arange(17420)
    with open(folder / "ETTh1.csv", "w") as csv:
        csv.write("date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT\n")
        for hour, row in zip(hours, hourly, strict=True):
            stamp = str(hour).replace("T", " ")
            csv.write(f"{stamp}:00:00,{','.join(map(str, row))}\n")
    rows: dict[str, list[dict[str, Any]]] = {
        "lines": [{"text": line} for line in lines],
        "pairs": [{"sentence1": s, "sentence2": s, "label": i % 2} for i, s in enumerate(lines)],
        "alpaca": [{"instruction": s, "input": "", "output": s} for s in lines[:400]],
        "chat": [{"messages": _chat(s)} for s in lines[:400]],
        "prompts": [{"prompt": _chat(s)[:1], "solution": "1"} for s in lines[:400]],
        "preferences": [
            {"prompt": _chat(s)[:1], "chosen": _chat(s)[1:], "rejected": _chat(s[::-1])[1:]}
            for s in lines[:400]
        ],
    }
    for name, table in rows.items():
        for split in ("train", "test"):
            path = folder / name / f"{split}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in table))
    (folder / "alpaca.json").write_text(json.dumps(rows["alpaca"]))
    (folder / "glue").mkdir(exist_ok=True)
    parts = []
    for split in ("train", "validation", "test"):
        table = [{**row, "idx": at} for at, row in enumerate(rows["pairs"])]
        (folder / "glue" / f"{split}.jsonl").write_text(
            "".join(json.dumps(r) + "\n" for r in table)
        )
        parts.append(f"      - split: {split}\n        path: {split}.jsonl\n")
    head = f"---\nconfigs:\n  - config_name: mrpc\n    data_files:\n{''.join(parts)}---\n"
    (folder / "glue" / "README.md").write_text(head)


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": text}]


def make_planetoid(folder: Path) -> None:
    """Writes the same graph as PyTorch Geometric's data set reads it."""
    from scipy.sparse import csr_matrix

    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    sizes = {"x": 140, "tx": 1000, "allx": 1708}
    graph = {a: rng.integers(0, 2708, 4).tolist() for a in range(2708)}
    parts: dict[str, Any] = {"graph": graph}
    for name, count in sizes.items():
        parts[name] = csr_matrix(rng.integers(0, 2, (count, 1433)).astype(np.float32))
        parts[name.replace("x", "y")] = np.eye(7, dtype=np.int32)[np.arange(count) % 7]
    for name, part in parts.items():
        (folder / f"ind.cora.{name}").write_bytes(pickle.dumps(part))
    (folder / "ind.cora.test.index").write_text("".join(f"{a}\n" for a in range(1708, 2708)))


def make_coco(folder: Path) -> None:
    """Writes images with boxes and classes as COCO has them."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for split in ("train2017", "val2017"):
        images, boxes = [], []
        (folder / split).symlink_to(Path("images") / split)
        (folder / "labels" / split).mkdir(parents=True)
        for at in range(12):
            _save_image(folder / "images" / split / f"{at:012}.jpg", 320, rng)
            images.append({"id": at, "file_name": f"{at:012}.jpg", "height": 320, "width": 320})
            for _ in range(3):
                x, y, wide, high = (int(n) for n in rng.integers(20, 140, 4))
                boxes.append({
                    "id": len(boxes) + 1, "image_id": at, "category_id": len(boxes) % 80 + 1,
                    "bbox": [x, y, wide, high], "area": wide * high, "iscrowd": 0,
                    "segmentation": [[x, y, x + wide, y, x + wide, y + high, x, y + high]],
                })  # fmt: skip
            label = folder / "labels" / split / f"{at:012}.txt"
            label.write_text(f"{at % 80} 0.5 0.5 0.3 0.3\n")
        path = folder / "annotations" / f"instances_{split}.json"
        path.parent.mkdir(exist_ok=True)
        classes = [{"id": n, "name": f"class{n}"} for n in range(1, 91)]
        path.write_text(json.dumps({"images": images, "annotations": boxes, "categories": classes}))
    named = "".join(f"  {n}: class{n}\n" for n in range(80))
    splits = "train: images/train2017\nval: images/val2017\n"
    (folder / "data.yaml").write_text(f"path: {folder}\n{splits}names:\n{named}")


def make_torch_home(folder: Path) -> None:
    """Writes weights of torchvision's models where torch.hub looks for downloaded ones."""
    import torchvision.models as models

    files = {"resnet50-0676ba61": "resnet50", "vgg19-dcbb9e9d": "vgg19", "vgg16-397923af": "vgg16"}
    (folder / "hub" / "checkpoints").mkdir(parents=True)
    for file, name in files.items():
        with torch.device("meta"):
            shapes = models.get_model(name, weights=None).state_dict()
        weights = {key: torch.zeros(w.shape, dtype=w.dtype) for key, w in shapes.items()}
        torch.save(weights, folder / "hub" / "checkpoints" / f"{file}.pth")


def make_nerf(folder: Path) -> None:
    """Writes views of a scene, with their cameras, as Blender's synthetic scenes have them."""
    from PIL import Image

    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for split in ("train", "val", "test"):
        frames = []
        for at in range(3):
            pixels = rng.integers(0, 256, (128, 128, 4), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{split}{at}.png")
            camera = np.eye(4)
            camera[2, 3] = 4
            frames.append({"file_path": f"{split}{at}", "transform_matrix": camera.tolist()})
        scene = {"camera_angle_x": 0.7, "frames": frames}
        (folder / f"transforms_{split}.json").write_text(json.dumps(scene))


def make_nbody(folder: Path) -> None:
    """Writes trajectories of five charged particles."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        shapes = {"loc": (200, 49, 3, 5), "vel": (200, 49, 3, 5), "edges": (200, 5, 5)}
        for name, shape in {**shapes, "charges": (200, 5, 1)}.items():
            values = rng.standard_normal(shape)
            np.save(folder / f"{name}_{split}_charged5_initvel1small.npy", values)


def make_cora(folder: Path) -> None:
    """Writes a citation graph as Cora's files have it, of 2,708 papers."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    with open(folder / "cora.content", "w") as file:
        for paper in range(2708):
            words = " ".join(map(str, rng.integers(0, 2, 1433)))
            file.write(f"{paper} {words} class{paper % 7}\n")
    pairs = rng.integers(0, 2708, (5429, 2))
    (folder / "cora.cites").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))


def make_tokenizer(folder: Path) -> Any:
    """Writes a tokenizer of byte pairs, trained on the made-up text, with a chat template."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(make_sentences(200), vocab_size=300, special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, pad_token="<pad>", bos_token="<s>",
        eos_token="</s>", unk_token="<unk>", mask_token="<mask>", cls_token="<s>",
        sep_token="</s>", model_max_length=512,
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_models(folder: Path) -> None:
    """Writes small language models with random weights, and their tokenizer."""
    import transformers as hf

    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    width = {"intermediate_size": 128, "max_position_embeddings": 512}
    models = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, {**shape, **width}),
        "qwen": (hf.Qwen2Config, hf.Qwen2ForCausalLM, {**shape, **width, "num_key_value_heads": 2}),
        "gpt2": (hf.GPT2Config, hf.GPT2LMHeadModel, {"n_embd": 64, "n_layer": 2, "n_head": 4}),
        "bert": (hf.BertConfig, hf.BertForMaskedLM, {**shape, **width}),
    }
    for name, (config, model, sizes) in models.items():
        make_tokenizer(folder / name)
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        model(config(vocab_size=320, **sizes, **ids)).save_pretrained(folder / name)
    ranks = "".join(f"{b64encode(bytes([n])).decode()} {n}\n" for n in range(256))
    (folder / "tokenizer.model").write_text(ranks)


def make_nanochat(folder: Path) -> None:
    """Writes nanochat's tokenizer, of bytes, and shards of its data."""
    import pyarrow as arrow
    import tiktoken
    from pyarrow import parquet

    names = ["bos", *(f"{who}_{end}" for who in ("user", "assistant", "python", "output")
                      for end in ("start", "end"))]  # fmt: skip
    encoding = tiktoken.Encoding(
        "bytes", pat_str=r"\S+|\s+", mergeable_ranks={bytes([n]): n for n in range(256)},
        special_tokens={f"<|{name}|>": 256 + at for at, name in enumerate(names)},
    )  # fmt: skip
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    sizes = torch.tensor([1] * 256 + [0] * len(names), dtype=torch.int32)
    torch.save(sizes, folder / "tokenizer" / "token_bytes.pt")
    (folder / "base_data_climbmix").mkdir()
    documents = arrow.table({"text": [" ".join(make_sentences(20)) for _ in range(600)]})
    for shard in range(2):
        path = folder / "base_data_climbmix" / f"shard_{shard:05}.parquet"
        parquet.write_table(documents, path, row_group_size=200)


def make_litgpt(folder: Path) -> None:
    """Writes a checkpoint as litgpt has it."""
    from litgpt import GPT, Config
    from litgpt.utils import save_config

    make_tokenizer(folder)
    config = Config.from_name("pythia-14m", padded_vocab_size=320, n_layer=2)
    torch.save(GPT(config).state_dict(), folder / "lit_model.pth")
    save_config(config, folder)
    settings = {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(settings))


def make_whisper(folder: Path) -> None:
    """Writes a small model of speech with its feature extractor and tokenizer."""
    import transformers as hf

    tokenizer = make_tokenizer(folder / "words")
    marks = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    vocabulary = tokenizer.get_vocab()
    vocabulary |= {mark: len(vocabulary) + at for at, mark in enumerate(marks)}
    hf.WhisperTokenizer(
        vocab=vocabulary, merges=[], pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>",
    ).save_pretrained(folder)  # fmt: skip
    hf.WhisperFeatureExtractor().save_pretrained(folder)
    start = vocabulary[marks[0]]
    config = hf.WhisperConfig(
        vocab_size=400, d_model=64, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=128,
        decoder_ffn_dim=128, encoder_attention_heads=4, decoder_attention_heads=4,
        decoder_start_token_id=start, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    hf.WhisperForConditionalGeneration(config).save_pretrained(folder)


def make_audio(folder: Path) -> None:
    """Writes a second of noise each, with what would be said."""
    import soundfile

    rng = np.random.default_rng(0)
    lines = make_sentences(32, 4)
    for name, rate in (("train", 16000), ("wavs", 22050)):
        (folder / name).mkdir(parents=True)
        for at in range(len(lines)):
            noise = (rng.standard_normal(2 * rate) * 0.1).clip(-1, 1)
            soundfile.write(folder / name / f"{at}.wav", noise, rate, "PCM_16")
    rows = ({"file_name": f"{at}.wav", "text": line} for at, line in enumerate(lines))
    table = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train" / "metadata.jsonl").write_text(table)
    (folder / "list.txt").write_text("".join(f"{at}|{line}\n" for at, line in enumerate(lines)))


def make_stable_diffusion(folder: Path) -> None:
    """Writes a latent diffusion pipeline of small parts."""
    import diffusers
    import transformers as hf

    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
    deep = {**sizes, "block_out_channels": (8, 16, 16, 32)}
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **sizes,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4, **deep,
    )  # fmt: skip
    config = hf.CLIPTextConfig(
        vocab_size=600, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=77, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    letters = [chr(c) for c in range(33, 127)]
    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    for token in [*letters, *(letter + "</w>" for letter in letters)]:
        vocabulary[token] = len(vocabulary)
    tokenizer = hf.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)
    scheduler = diffusers.DDPMScheduler(beta_schedule="scaled_linear", num_train_timesteps=1000)
    diffusers.StableDiffusionPipeline(
        vae, hf.CLIPTextModel(config), tokenizer, unet, scheduler, None, None,
        requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip


MAKERS: dict[str, Callable[[Path], None]] = {
    "images": make_images,
    "captions": make_captions,
    "mnist": make_mnist,
    "whole_mnist": lambda folder: make_mnist(folder, 60_000, 10_000),
    "text": make_text,
    "cora": make_cora,
    "nanochat": make_nanochat,
    "litgpt": make_litgpt,
    "audio": make_audio,
    "whisper": make_whisper,
    "planetoid": make_planetoid,
    "coco": make_coco,
    "torch_home": make_torch_home,
    "nerf": make_nerf,
    "nbody": make_nbody,
    "models": make_models,
    "stable_diffusion": make_stable_diffusion,
}
