"""The launches: repositories at their commits, scripts, arguments, and the edits they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Launch:
    """One script of a repository, as its users start it.

    Attributes:
        name: What the page calls it.
        kind: The kind of work.
        repository: Its owner and name; the commit is in `COMMITS`.
        command: The script and its arguments; ``{text}`` is the folder of that made-up data.
        folder: Where it is started, below the repository.
        options: Options of ``fxmem run``.
        place: Paths below the repository where made-up data is expected, and what is put there.
        edits: File, text and its replacement, where the internet is asked for.
        env: Environment variables.
        paths: Folders on PYTHONPATH, below `folder`.
        cpu: Arguments added where its steps are compared with real ones on the CPU; None if they
            are not.
        cause: Why they differ by more than half a percent.
        prints: What it prints of ``torch.cuda.max_memory_allocated()`` after a step, as a pattern,
            and in which unit.
    """

    name: str
    kind: str
    repository: str
    command: str
    folder: str = ""
    options: str = ""
    place: Mapping[str, str] = field(default_factory=dict)
    edits: tuple[tuple[str, str, str], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    cpu: str | None = None
    cause: str = ""
    prints: tuple[str, int] = ("", 0)


COMMITS = {
    "karpathy/nanoGPT": "3adf61e",
    "karpathy/minGPT": "37baab7",
    "rasbt/LLMs-from-scratch": "28c65cd",
    "milesial/Pytorch-UNet": "21d7850",
    "pytorch/examples": "77f55b9",
    "karpathy/llama2.c": "350e04f",
    "yenchenlin/nerf-pytorch": "63a5a63",
    "facebookresearch/detr": "29901c5",
    "eriklindernoren/PyTorch-GAN": "36d3c77",
    "huggingface/trl": "f2cd577",
    "huggingface/transformers": "5a67f0a",
    "huggingface/diffusers": "58eb52c",
    "huggingface/pytorch-image-models": "aa4b585",
    "huggingface/accelerate": "16cb6eb",
    "junyanz/pytorch-CycleGAN-and-pix2pix": "da39a52",
    "facebookresearch/DiT": "ed81ce2",
    "facebookresearch/dlrm": "090956e",
    "openai/guided-diffusion": "22e0df8",
    "vwxyzjn/cleanrl": "fe8d8a0",
    "tkipf/pygcn": "1600b5b",
    "Diego999/pyGAT": "3664f2d",
    "sthalles/SimCLR": "1848fc9",
    "locuslab/TCN": "2f8c2b8",
    "kuangliu/pytorch-cifar": "49b7aa9",
    "mlfoundations/open_clip": "89fb801",
    "microsoft/Swin-Transformer": "f82860b",
    "pytorch/torchtitan": "2210414",
    "karpathy/nanochat": "92d63d4",
    "pyg-team/pytorch_geometric": "5c6461b",
    "Lightning-AI/pytorch-lightning": "7f0c343",
    "Lightning-AI/litgpt": "2685705",
    "pytorch/torchtune": "bd2a0fc",
    "lucidrains/byol-pytorch": "2993126",
    "lucidrains/x-transformers": "9252ed7",
    "zhouhaoyi/Informer2020": "29f2a73",
    "vgsatorras/egnn": "e9ca6c0",
    "openai/improved-diffusion": "1bc7bbb",
    "rosinality/stylegan2-pytorch": "bef283a",
    "ultralytics/yolov5": "5081342",
    "speechbrain/speechbrain": "9c826ef",
    "jik876/hifi-gan": "4769534",
}

# fmt: off
LAUNCHES = (
    Launch("nanoGPT train", "language models", "karpathy/nanoGPT",
        "train.py config/train_shakespeare_char.py --eval_iters=2",
        place={f"data/shakespeare_char/{f}": f"{{text}}/{f}" for f in ("train.bin", "val.bin", "meta.pkl")}, cpu="--device=cpu --compile=False --batch_size=4"),
    Launch("minGPT chargpt", "language models", "karpathy/minGPT", "chargpt.py",
        options="--steps 1", folder="projects/chargpt", paths=("../..",), place={"projects/chargpt/input.txt": "{text}/input.txt"}),
    Launch("minGPT adder", "language models", "karpathy/minGPT", "adder.py",
        options="--steps 1", folder="projects/adder", paths=("../..",)),
    Launch("LLMs-from-scratch gpt_train", "language models", "rasbt/LLMs-from-scratch", "gpt_train.py",
        folder="ch05/01_main-chapter-code", place={"ch05/01_main-chapter-code/the-verdict.txt": "{text}/input.txt", "ch05/01_main-chapter-code/tiktoken.py": "{stubs}/tiktoken.py"}),
    Launch("Pytorch-UNet", "segmentation", "milesial/Pytorch-UNet", "train.py --epochs 1 --batch-size 2 --scale 0.5 --amp",
        place={"data/imgs": "{images}/flat", "data/masks": "{images}/masks"}),
    Launch("imagenet", "classification", "pytorch/examples", "main.py -a resnet18 --dummy -b 8", folder="imagenet", cpu="-j 1"),
    Launch("mnist", "classification", "pytorch/examples", "main.py", folder="mnist", place={"data": "{mnist}"}, cpu=""),
    Launch("dcgan", "GANs", "pytorch/examples", "main.py --dataset fake --accel", folder="dcgan", cpu="--workers 0 --batchSize 8"),
    Launch("vae", "classification", "pytorch/examples", "main.py", folder="vae", place={"data": "{mnist}"}, cpu=""),
    Launch("word_language_model transformer", "language models", "pytorch/examples",
        "main.py --accel --model Transformer --use-optimizer", folder="word_language_model", place={"word_language_model/data/wikitext-2": "{text}"}, cpu=""),
    Launch("word_language_model LSTM", "language models", "pytorch/examples",
        "main.py --accel", folder="word_language_model", place={"word_language_model/data/wikitext-2": "{text}"}, cpu=""),
    Launch("examples gat", "graphs", "pytorch/examples", "main.py", folder="gat", place={"gat/cora": "{cora}"}),
    Launch("examples gcn", "graphs", "pytorch/examples", "main.py", folder="gcn", place={"gcn/cora": "{cora}"},
        edits=(("gcn/main.py", """    with requests.get(cora_url, stream=True) as tgz_file:
        with tarfile.open(fileobj=tgz_file.raw, mode='r:gz') as tgz_object:
            tgz_object.extractall()
""", ""),)),
    Launch("siamese", "classification", "pytorch/examples", "main.py", folder="siamese_network", place={"data": "{mnist}"}, cpu=""),
    Launch("super_resolution", "segmentation", "pytorch/examples", "main.py --upscale_factor 3 --accel", folder="super_resolution",
        place={"super_resolution/dataset/BSDS300/images/train": "{images}/flat", "super_resolution/dataset/BSDS300/images/test": "{images}/flat"}, cpu=""),
    Launch("fast_neural_style", "segmentation", "pytorch/examples",
        "neural_style/neural_style.py train --dataset {images}/train --style-image {images}/flat/0.png --save-model-dir out --epochs 1 --accel", folder="fast_neural_style", env={"TORCH_HOME": "{torch_home}"}),
    Launch("regression", "science", "pytorch/examples", "main.py", options="--device cpu", folder="regression", cpu=""),
    Launch("mnist_rnn", "classification", "pytorch/examples", "main.py --accel", folder="mnist_rnn", place={"data": "{mnist}"}),
    Launch("forward_forward", "classification", "pytorch/examples", "main.py --train_size 512 --test_size 512", folder="mnist_forward_forward", place={"mnist_forward_forward/data": "{mnist}"}),
    Launch("actor_critic", "RL", "pytorch/examples", "actor_critic.py", options="--device cpu", folder="reinforcement_learning", cpu="", cause="actions are values, so episodes have other lengths"),
    Launch("reinforce", "RL", "pytorch/examples", "reinforce.py", options="--device cpu", folder="reinforcement_learning", cpu="", cause="actions are values, so episodes have other lengths"),
    Launch("trl sft", "TRL", "huggingface/trl", "trl/scripts/sft.py --model_name_or_path {models}/qwen --dataset_name {text}/chat --output_dir out --per_device_train_batch_size 4", cpu="--bf16 False --use_cpu True", paths=(".",)),
    Launch("trl dpo", "TRL", "huggingface/trl", "trl/scripts/dpo.py --model_name_or_path {models}/qwen --dataset_name {text}/preferences --output_dir out --per_device_train_batch_size 4", cpu="--bf16 False --use_cpu True", paths=(".",)),
    Launch("trl grpo", "TRL", "huggingface/trl", "trl/scripts/grpo.py --model_name_or_path {models}/qwen --dataset_name {text}/prompts --output_dir out --reward_funcs accuracy_reward --max_completion_length 32 --num_generations 4 --per_device_train_batch_size 4", paths=(".",)),
    Launch("trl sft lora", "TRL", "huggingface/trl", "trl/scripts/sft.py --model_name_or_path {models}/qwen --dataset_name {text}/chat --output_dir out --per_device_train_batch_size 4 --use_peft --gradient_checkpointing", paths=(".",)),
    Launch("trl reward", "TRL", "huggingface/trl", "trl/scripts/reward.py --model_name_or_path {models}/qwen --dataset_name {text}/preferences --output_dir out", paths=(".",)),
    Launch("trl kto", "TRL", "huggingface/trl", "trl/scripts/kto.py --model_name_or_path {models}/qwen --dataset_name {text}/preferences --output_dir out", paths=(".",)),
    Launch("run_clm", "language models", "huggingface/transformers",
        "run_clm.py --model_name_or_path {models}/gpt2 --train_file {text}/train.txt --validation_file {text}/test.txt --do_train --block_size 128 --output_dir out", folder="examples/pytorch/language-modeling", cpu=""),
    Launch("run_mlm", "language models", "huggingface/transformers",
        "run_mlm.py --model_name_or_path {models}/bert --train_file {text}/train.txt --validation_file {text}/test.txt --do_train --max_seq_length 128 --output_dir out", folder="examples/pytorch/language-modeling", cpu=""),
    Launch("run_glue", "language models", "huggingface/transformers",
        "run_glue.py --model_name_or_path {models}/bert --train_file {text}/pairs/train.json --validation_file {text}/pairs/test.json --do_train --max_seq_length 64 --output_dir out",
        folder="examples/pytorch/text-classification", place={"examples/pytorch/text-classification/accuracy": "{stubs}/accuracy"}, cpu=""),
    Launch("text_to_image", "diffusers", "huggingface/diffusers",
        "train_text_to_image.py --pretrained_model_name_or_path {stable_diffusion} --train_data_dir {captions} --resolution 64 --train_batch_size 2 --use_ema --mixed_precision fp16 --output_dir out", folder="examples/text_to_image"),
    Launch("text_to_image_lora", "diffusers", "huggingface/diffusers",
        "train_text_to_image_lora.py --pretrained_model_name_or_path {stable_diffusion} --train_data_dir {captions} --resolution 64 --train_batch_size 2 --gradient_accumulation_steps 2 --output_dir out", folder="examples/text_to_image"),
    Launch("dreambooth", "diffusers", "huggingface/diffusers",
        "train_dreambooth.py --pretrained_model_name_or_path {stable_diffusion} --instance_data_dir {images}/flat --instance_prompt dog --resolution 64 --train_batch_size 2 --output_dir out", folder="examples/dreambooth"),
    Launch("unconditional", "diffusers", "huggingface/diffusers",
        "train_unconditional.py --train_data_dir {images}/train --resolution 64 --train_batch_size 4 --use_ema --mixed_precision bf16 --output_dir out", folder="examples/unconditional_image_generation", cpu="--mixed_precision no --train_batch_size 1"),
    Launch("controlnet", "diffusers", "huggingface/diffusers",
        "train_controlnet.py --pretrained_model_name_or_path {stable_diffusion} --train_data_dir {captions} --resolution 64 --train_batch_size 2 --conditioning_image_column image --mixed_precision bf16 --output_dir out", folder="examples/controlnet"),
    Launch("textual_inversion", "diffusers", "huggingface/diffusers",
        "textual_inversion.py --pretrained_model_name_or_path {stable_diffusion} --train_data_dir {images}/flat --resolution 64 --train_batch_size 2 --placeholder_token <cat> --initializer_token c --learnable_property object --output_dir out", folder="examples/textual_inversion"),
    Launch("llama2.c", "language models", "karpathy/llama2.c", "train.py --eval_iters=2",
        place={f"data/TinyStories_all_data/data0{n}.bin": "{text}/train.bin" for n in (0, 1)}),
    Launch("nerf-pytorch", "NeRF", "yenchenlin/nerf-pytorch", "run_nerf.py --config configs/lego.txt --datadir {nerf}"),
    Launch("DETR", "detection", "facebookresearch/detr", "main.py --coco_path {coco}", env={"TORCH_HOME": "{torch_home}"}, prints=(r"max mem: (\d+)", 2**20)),
    Launch("wgan_gp", "GANs", "eriklindernoren/PyTorch-GAN", "wgan_gp.py", folder="implementations/wgan_gp", place={"data/fashion-mnist": "{mnist}", "data/mnist": "{mnist}"}, cpu=""),
    Launch("infogan", "GANs", "eriklindernoren/PyTorch-GAN", "infogan.py", folder="implementations/infogan", place={"data/mnist": "{mnist}"}, cpu=""),
    Launch("PyTorch-GAN gan", "GANs", "eriklindernoren/PyTorch-GAN", "gan.py", folder="implementations/gan", place={"data/mnist": "{mnist}"}, cpu=""),
    Launch("PyTorch-GAN cyclegan", "GANs", "eriklindernoren/PyTorch-GAN", "cyclegan.py --n_cpu 2", folder="implementations/cyclegan",
        place={"data/monet2photo/train": "{images}/pairs/train", "data/monet2photo/test": "{images}/pairs/train"}, cpu="--img_height 32 --img_width 32 --n_residual_blocks 2 --n_cpu 0 --sample_interval 100000"),
    Launch("PyTorch-GAN esrgan", "GANs", "eriklindernoren/PyTorch-GAN", "esrgan.py --warmup_batches 1 --n_cpu 2", folder="implementations/esrgan",
        place={"data/img_align_celeba": "{images}/flat"}, env={"TORCH_HOME": "{torch_home}"}),
    Launch("CycleGAN", "GANs", "junyanz/pytorch-CycleGAN-and-pix2pix", "train.py --dataroot {images}/pairs --name x --model cycle_gan --display_id -1"),
    Launch("pix2pix", "GANs", "junyanz/pytorch-CycleGAN-and-pix2pix", "train.py --dataroot {images}/aligned --name x --model pix2pix --display_id -1"),
    Launch("DiT", "diffusers", "facebookresearch/DiT", "train.py --data-path {images}/train --global-batch-size 8 --model DiT-B/4",
        options="--world-size 2", place={"stabilityai/sd-vae-ft-ema": "{stable_diffusion}/vae"}),
    Launch("DLRM", "recommender", "facebookresearch/dlrm", "dlrm_s_pytorch.py --mini-batch-size=128 --data-size=2048 --arch-embedding-size=1000-2000-3000 --use-gpu", cpu=""),
    Launch("guided-diffusion", "diffusers", "openai/guided-diffusion", "scripts/image_train.py --data_dir {images}/flat --image_size 64 --num_channels 64 --learn_sigma True --batch_size 4", paths=(".",)),
    Launch("improved-diffusion", "diffusers", "openai/improved-diffusion", "scripts/image_train.py --data_dir {images}/flat --image_size 64 --num_channels 64 --batch_size 4", paths=(".",)),
    Launch("cleanrl ppo", "RL", "vwxyzjn/cleanrl", "cleanrl/ppo.py --num-steps 32"),
    Launch("cleanrl dqn", "RL", "vwxyzjn/cleanrl", "cleanrl/dqn.py --learning-starts 200", paths=(".",)),
    Launch("cleanrl c51", "RL", "vwxyzjn/cleanrl", "cleanrl/c51.py --learning-starts 200", paths=(".",)),
    Launch("pygcn", "graphs", "tkipf/pygcn", "train.py", folder="pygcn", paths=("..",), place={"data/cora": "{cora}"}, cpu=""),
    Launch("pyGAT", "graphs", "Diego999/pyGAT", "train.py", place={"data/cora": "{cora}"}, cpu=""),
    Launch("SimCLR", "self-supervision", "sthalles/SimCLR", "run.py -dataset-name cifar10 -b 64 -j 2 --fp16-precision",
        edits=(("data_aug/contrastive_learning_dataset.py", "datasets.CIFAR10(self.root_folder, train=True,", "datasets.FakeData(size=512, image_size=(3, 32, 32),"),
               ("data_aug/contrastive_learning_dataset.py", """n_views),
                                                              download=True),

                          'stl10'""", """n_views)),

                          'stl10'"""))),
    Launch("timm", "classification", "huggingface/pytorch-image-models", "train.py --data-dir {images} --model resnet18 -b 16 --workers 1 --model-ema --clip-grad 1 --amp"),
    Launch("TCN adding", "audio", "locuslab/TCN", "add_test.py --epochs 1 --seq_len 100", folder="TCN/adding_problem", paths=("../..",), cpu=""),
    Launch("TCN copy memory", "audio", "locuslab/TCN", "copymem_test.py --epochs 1", folder="TCN/copy_memory", paths=("../..",), cpu=""),
    Launch("pytorch-cifar", "classification", "kuangliu/pytorch-cifar", "main.py",
        edits=(("utils.py", "_, term_width = os.popen('stty size', 'r').read().split()", "term_width = 80"),
               ("main.py", """torchvision.datasets.CIFAR10(
    root='./data', train=True, download=True,""", "torchvision.datasets.FakeData(2048, (3, 32, 32),"),
               ("main.py", """torchvision.datasets.CIFAR10(
    root='./data', train=False, download=True,""", "torchvision.datasets.FakeData(2048, (3, 32, 32),")), cpu=""),
    Launch("open_clip", "self-supervision", "mlfoundations/open_clip", "-m open_clip_train.main --dataset-type synthetic --model RN50 --batch-size 8 --train-num-samples 64 --workers 1 --precision amp", folder="src"),
    Launch("Swin", "classification", "microsoft/Swin-Transformer", "main.py --cfg configs/swin/swin_tiny_patch4_window7_224.yaml --data-path {images} --batch-size 4 --opts PRINT_FREQ 1", options="--world-size 2", prints=(r"mem (\d+)MB", 2**20), edits=(("lr_scheduler.py", "            t_mul=1.,\n", ""),)),
    Launch("pyg gcn", "graphs", "pyg-team/pytorch_geometric", "examples/gcn.py", place={"data/Planetoid/Cora/raw": "{planetoid}"}, cpu=""),
    Launch("pyg gat", "graphs", "pyg-team/pytorch_geometric", "examples/gat.py", place={"data/Planetoid/Cora/raw": "{planetoid}"}, cpu=""),
    Launch("pyg autoencoder", "graphs", "pyg-team/pytorch_geometric", "examples/autoencoder.py --variational", place={"data/Planetoid/Cora/raw": "{planetoid}"}, cpu=""),
    Launch("FSDP2 example", "several GPUs", "pytorch/examples", "example.py", folder="distributed/FSDP2", options="--world-size 4"),
    Launch("DDP example", "several GPUs", "pytorch/examples", "example.py", folder="distributed/ddp", options="--world-size 4"),
    Launch("fsdp_tp example", "several GPUs", "pytorch/examples", "fsdp_tp_example.py", folder="distributed/tensor_parallelism", options="--world-size 8"),
    Launch("torchtitan", "several GPUs", "pytorch/torchtitan", "-m torchtitan.train --module llama3 --config llama3_debugmodel", options="--world-size 8",
        place={"tests/assets/c4_test/data.json": "{text}/lines/train.json"}),
    Launch("tensor_parallel example", "several GPUs", "pytorch/examples", "tensor_parallel_example.py", folder="distributed/tensor_parallelism", options="--world-size 4"),
    Launch("minGPT-ddp", "several GPUs", "pytorch/examples", "main.py data_config.path={text}/input.txt", folder="distributed/minGPT-ddp/mingpt", options="--world-size 4"),
    Launch("Lightning autoencoder", "self-supervision", "Lightning-AI/pytorch-lightning", "autoencoder.py --trainer.max_epochs=1", folder="examples/pytorch/basics", place={"examples/Datasets": "{whole_mnist}", "examples/pytorch/basics/data": "{whole_mnist}"}, cpu=""),
    Launch("Lightning DDP", "several GPUs", "Lightning-AI/pytorch-lightning", "autoencoder.py --trainer.max_epochs=1 --trainer.strategy=ddp --trainer.devices=4 --trainer.accelerator=gpu", options="--world-size 4",
        folder="examples/pytorch/basics", place={"examples/Datasets": "{whole_mnist}", "examples/pytorch/basics/data": "{whole_mnist}"}),
    Launch("Lightning FSDP2", "several GPUs", "Lightning-AI/pytorch-lightning", "train.py", options="--world-size 4", folder="examples/pytorch/tensor_parallel"),
    Launch("Lightning GAN", "GANs", "Lightning-AI/pytorch-lightning", "generative_adversarial_net.py", folder="examples/pytorch/domain_templates", place={"examples/pytorch/domain_templates/data": "{whole_mnist}"}),
    Launch("Fabric image classifier", "classification", "Lightning-AI/pytorch-lightning", "train_fabric.py", folder="examples/fabric/image_classifier", place={"Datasets": "{mnist}"}),
    Launch("nanochat", "language models", "karpathy/nanochat", "-m scripts.base_train --depth 20 --eval-every -1 --core-metric-every -1 --sample-every -1", env={"NANOCHAT_BASE_DIR": "{nanochat}"}, options="--gpu h100"),
    Launch("litgpt", "language models", "Lightning-AI/litgpt", "-m litgpt finetune_lora {litgpt} --data JSON --data.json_path {text}/alpaca.json --data.val_split_fraction 0.1 --out_dir out --train.global_batch_size 4 --train.micro_batch_size 2"),
    Launch("litgpt full", "language models", "Lightning-AI/litgpt", "-m litgpt finetune_full {litgpt} --data JSON --data.json_path {text}/alpaca.json --data.val_split_fraction 0.1 --out_dir out --train.global_batch_size 4 --train.micro_batch_size 2"),
    Launch("torchtune", "language models", "pytorch/torchtune", "recipes/full_finetune_single_device.py --config recipes/configs/llama3_2/1B_full_single_device.yaml output_dir=out tokenizer.path={models}/tokenizer.model checkpointer.checkpoint_dir={models}/llama "
        "model._component_=torchtune.models.llama3.llama3 model.vocab_size=320 model.num_layers=2 model.num_heads=4 model.num_kv_heads=4 model.embed_dim=64 model.max_seq_len=512 model.intermediate_dim=128 "
        "dataset.source=json dataset.data_files={text}/alpaca.json optimizer._component_=torch.optim.AdamW optimizer_in_bwd=False "
        "log_peak_memory_stats=True log_every_n_steps=1 metric_logger._component_=torchtune.training.metric_logging.StdoutLogger", paths=(".",), prints=(r"peak_memory_alloc:([\d.]+)", 2**30)),
    Launch("accelerate nlp_example", "language models", "huggingface/accelerate", "nlp_example.py", folder="examples",
        place={"examples/glue/glue.py": "{stubs}/accuracy/accuracy.py", "examples/bert-base-cased": "{models}/bert", "examples/nyu-mll/glue": "{text}/glue"}, cpu=""),
    Launch("accelerate nd_parallel", "several GPUs", "huggingface/accelerate", "nd_parallel.py --model-name {models}/llama --dp-shard-size 8 --sequence-length 128", options="--world-size 8",
        folder="examples/torch_native_parallelism", place={"examples/torch_native_parallelism/roneneldan/TinyStories": "{text}/lines"}),
    Launch("accelerate fsdp2", "several GPUs", "huggingface/accelerate", "fsdp2_fp8.py --precision bf16 --sequence-length 128", options="--world-size 8", folder="examples/torch_native_parallelism",
        place={"examples/torch_native_parallelism/roneneldan/TinyStories": "{text}/lines", "examples/torch_native_parallelism/NousResearch/Hermes-3-Llama-3.1-8B": "{models}/llama"}),
    Launch("accelerate fsdp peak", "several GPUs", "huggingface/accelerate", "accelerate launch --num_processes 4 --use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --mixed_precision no by_feature/fsdp_with_peak_mem_tracking.py --model_name_or_path {models}/bert --output_dir out", options="--", folder="examples",
        place={"examples/glue/glue.py": "{stubs}/accuracy/accuracy.py", "examples/nyu-mll/glue": "{text}/glue"}),
    Launch("accelerate cv_example", "classification", "huggingface/accelerate", "cv_example.py --data_dir {images}/pets", folder="examples", edits=(("examples/cv_example.py", "pretrained=True", "pretrained=False"),)),
    Launch("yolov5", "detection", "ultralytics/yolov5", "train.py --weights '' --cfg models/yolov5n.yaml --data {coco}/data.yaml --imgsz 320 --batch-size 4 --workers 0 --noplots", place={"Arial.ttf": "{text}/input.txt"}),
    Launch("speechbrain ASR", "speech", "speechbrain/speechbrain", "tests/integration/ASR_CTC/example_asr_ctc_experiment.py", options="--device cpu", paths=(".",)),
    Launch("whisper", "speech", "huggingface/transformers", "run_speech_recognition_seq2seq.py --model_name_or_path {whisper} --dataset_name {audio} --train_split_name train --eval_split_name train --do_train --output_dir out --text_column_name text --freeze_feature_encoder False",
        folder="examples/pytorch/speech-recognition", place={"examples/pytorch/speech-recognition/torchcodec": "{stubs}/torchcodec", "examples/pytorch/speech-recognition/wer/wer.py": "{stubs}/accuracy/accuracy.py"}),
    Launch("HiFi-GAN", "audio", "jik876/hifi-gan", "train.py --config config_v3.json --input_wavs_dir {audio}/wavs --input_training_file {audio}/list.txt --input_validation_file {audio}/list.txt",
        edits=(("meldataset.py", "librosa_mel_fn(sampling_rate, n_fft, num_mels, fmin, fmax)", "librosa_mel_fn(sr=sampling_rate, n_fft=n_fft, n_mels=num_mels, fmin=fmin, fmax=fmax)"),
               ("meldataset.py", "center=center, pad_mode='reflect', normalized=False, onesided=True)", "center=center, pad_mode='reflect', normalized=False, onesided=True, return_complex=False)"))),
    Launch("byol", "self-supervision", "lucidrains/byol-pytorch", "train.py --image_folder {images}/flat", options="--world-size 2", folder="examples/lightning", paths=("../..",), env={"TORCH_HOME": "{torch_home}"},
        edits=(("examples/lightning/train.py", "gpus = NUM_GPUS", "devices = NUM_GPUS"),)),
    Launch("x-transformers enwik8", "language models", "lucidrains/x-transformers", "train_enwik8.py", options="--steps 1", place={"data/enwik8.gz": "{text}/enwik8.gz"}),
    Launch("Informer", "science", "zhouhaoyi/Informer2020", "main_informer.py --model informer --data ETTh1 --root_path {text}/ --num_workers 0", edits=(("utils/tools.py", "np.Inf", "np.inf"),), cpu=""),
    Launch("egnn", "science", "vgsatorras/egnn", "main_nbody.py --exp_name x --model egnn_vel --max_training_samples 200 --lr 5e-4", place={"n_body_system/dataset": "{nbody}"}, cpu=""),
    Launch("stylegan2", "GANs", "rosinality/stylegan2-pytorch", "train.py {text}"),
)
