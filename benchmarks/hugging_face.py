"""Hugging Face architectures at toy sizes: class, config class, sizes and inputs.

Configurations are as small as their models allow, so that even a real step takes milliseconds;
the number of layers is what their code paths need.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.cases import Case, Spec, hugging_face, ids, image

Sizes = dict[str, Any]

DECODER: Sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER: Sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SEQ2SEQ: Sizes = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
VISION: Sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
SPEECH: Sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
    "mask_time_prob": 0.0,
    "num_feat_extract_layers": 2,
}
STAGES: Sizes = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
TEXT_TOWER: Sizes = {**ENCODER, "bos_token_id": 1, "eos_token_id": 2}
CLIP: Sizes = {"text_config": TEXT_TOWER, "vision_config": VISION, "projection_dim": 16}

TOKENS: Sizes = {"input_ids": ids(2, 16)}
LABELLED: Sizes = {"input_ids": ids(2, 16), "labels": ids(2, 16)}
PIXELS: Sizes = {"pixel_values": image(2, 3, 32, 32)}
PAIR: Sizes = {"input_ids": ids(2, 16), "decoder_input_ids": ids(2, 8)}
MOE: Sizes = {**DECODER, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IMAGE_TEXT: Sizes = {**TOKENS, **PIXELS}
WAVE: Sizes = {"input_values": image(2, 1600)}

# Fields of older configurations, by the names that they still go by.
GPT: Sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 128}
HYBRID: Sizes = {**DECODER, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16}

# family: (model class, config class, sizes, inputs)
TABLE: dict[str, tuple[str, str, Sizes, Sizes]] = {
    # decoders
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT, LABELLED),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 4}, LABELLED),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**GPT, "rotary_dim": 4}, TOKENS),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "vocab_size": 128,
        },
        LABELLED,
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", DECODER, LABELLED),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT, LABELLED),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32},
        LABELLED,
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128},
        LABELLED,
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER, LABELLED),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER, LABELLED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER, LABELLED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}, LABELLED),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**DECODER, "head_dim": 8}, LABELLED),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 8}, LABELLED),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, "head_dim": 8}, LABELLED),
    "phi": ("PhiForCausalLM", "PhiConfig", DECODER, LABELLED),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", DECODER, LABELLED),
    "falcon": ("FalconForCausalLM", "FalconConfig", DECODER, LABELLED),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 128},
        LABELLED,
    ),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", DECODER, LABELLED),
    "cohere": ("CohereForCausalLM", "CohereConfig", DECODER, LABELLED),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", DECODER, LABELLED),
    "granite": ("GraniteForCausalLM", "GraniteConfig", DECODER, LABELLED),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", DECODER, LABELLED),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", DECODER, LABELLED),
    # mixtures of experts
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**MOE, "num_local_experts": 4}, LABELLED),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**MOE, "num_experts": 4}, LABELLED),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**MOE, "num_experts": 4}, LABELLED),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**MOE, "num_local_experts": 4}, LABELLED),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **MOE,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
        LABELLED,
    ),
    # state-space and other recurrences
    "mamba": ("MambaForCausalLM", "MambaConfig", {**DECODER, "state_size": 8}, LABELLED),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {**DECODER, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1},
        LABELLED,
    ),
    "falcon_mamba": ("FalconMambaForCausalLM", "FalconMambaConfig", DECODER, LABELLED),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {**DECODER, "num_hidden_layers": 3, "lru_width": 32, "head_dim": 8},
        LABELLED,
    ),
    "rwkv": (
        "RwkvForCausalLM",
        "RwkvConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 128},
        LABELLED,
    ),
    "bamba": ("BambaForCausalLM", "BambaConfig", {**HYBRID, "attn_layer_indices": [1]}, LABELLED),
    # encoders
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER, LABELLED),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", ENCODER, LABELLED),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 128},
        LABELLED,
    ),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**ENCODER, "embedding_size": 16}, LABELLED),
    "electra": ("ElectraModel", "ElectraConfig", {**ENCODER, "embedding_size": 16}, TOKENS),
    "deberta_v2": ("DebertaV2Model", "DebertaV2Config", ENCODER, TOKENS),
    "mpnet": ("MPNetModel", "MPNetConfig", ENCODER, TOKENS),
    "xlnet": (
        "XLNetModel",
        "XLNetConfig",
        {"d_model": 32, "d_inner": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
        TOKENS,
    ),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", ENCODER, LABELLED),
    "fnet": ("FNetModel", "FNetConfig", ENCODER, TOKENS),
    "longformer": (
        "LongformerModel",
        "LongformerConfig",
        {**ENCODER, "attention_window": 8},
        TOKENS,
    ),
    "big_bird": ("BigBirdModel", "BigBirdConfig", ENCODER, TOKENS),
    # encoder-decoders
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128},
        PAIR,
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ, LABELLED),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", SEQ2SEQ, LABELLED),
    "marian": ("MarianMTModel", "MarianConfig", SEQ2SEQ, LABELLED),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", SEQ2SEQ, LABELLED),
    "m2m_100": ("M2M100ForConditionalGeneration", "M2M100Config", SEQ2SEQ, LABELLED),
    "prophetnet": (
        "ProphetNetModel",
        "ProphetNetConfig",
        {
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "vocab_size": 128,
        },
        PAIR,
    ),
    # vision
    "vit": ("ViTForImageClassification", "ViTConfig", VISION, PIXELS),
    "deit": ("DeiTModel", "DeiTConfig", VISION, PIXELS),
    "beit": ("BeitModel", "BeitConfig", VISION, PIXELS),
    "dinov2": ("Dinov2Model", "Dinov2Config", VISION, PIXELS),
    "vit_mae": ("ViTMAEForPreTraining", "ViTMAEConfig", VISION, PIXELS),
    "swin": (
        "SwinModel",
        "SwinConfig",
        {
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "image_size": 32,
            "patch_size": 2,
            "window_size": 4,
        },
        PIXELS,
    ),
    "convnext": ("ConvNextModel", "ConvNextConfig", STAGES, PIXELS),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {**STAGES, "embedding_size": 8},
        PIXELS,
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {**STAGES, "decoder_hidden_size": 16},
        {"pixel_values": image(2, 3, 64, 64)},
    ),
    "mobilevit": ("MobileViTModel", "MobileViTConfig", {}, {"pixel_values": image(2, 3, 64, 64)}),
    "yolos": ("YolosForObjectDetection", "YolosConfig", {**VISION, "image_size": [32, 32]}, PIXELS),
    "detr": (
        "DetrForObjectDetection",
        "DetrConfig",
        {
            **{k: v for k, v in SEQ2SEQ.items() if "token" not in k and k != "vocab_size"},
            "num_queries": 10,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": {
                "model_type": "resnet",
                **STAGES,
                "embedding_size": 8,
                "out_features": ["stage4"],
            },
        },
        {"pixel_values": image(2, 3, 64, 64)},
    ),
    "sam": (
        "SamModel",
        "SamConfig",
        {
            "vision_config": {
                **VISION,
                "output_channels": 16,
                "mlp_dim": 64,
                "window_size": 2,
                "global_attn_indexes": [1],
                "num_pos_feats": 8,
            },
            "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8},
            "mask_decoder_config": {
                "hidden_size": 16,
                "mlp_dim": 32,
                "num_attention_heads": 4,
                "iou_head_hidden_dim": 16,
            },
        },
        {"pixel_values": image(1, 3, 32, 32), "input_points": image(1, 1, 2, 2)},
    ),
    # audio
    "wav2vec2": ("Wav2Vec2Model", "Wav2Vec2Config", SPEECH, WAVE),
    "hubert": ("HubertModel", "HubertConfig", SPEECH, WAVE),
    "wavlm": ("WavLMModel", "WavLMConfig", SPEECH, WAVE),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**SEQ2SEQ, "max_source_positions": 32, "num_mel_bins": 16},
        {"input_features": image(2, 16, 64), "labels": ids(2, 8)},
    ),
    "ast": (
        "ASTModel",
        "ASTConfig",
        {**VISION, "max_length": 64, "num_mel_bins": 16},
        {"input_values": image(2, 64, 16)},
    ),
    # several modalities
    "clip": ("CLIPModel", "CLIPConfig", CLIP, {**IMAGE_TEXT, "return_loss": True}),
    "siglip": ("SiglipModel", "SiglipConfig", CLIP, IMAGE_TEXT),
    "blip": ("BlipModel", "BlipConfig", CLIP, {**IMAGE_TEXT, "return_loss": True}),
    "vilt": (
        "ViltModel",
        "ViltConfig",
        {**ENCODER, **VISION},
        {**IMAGE_TEXT, "pixel_mask": Spec((2, 32, 32), torch.int64, 2)},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **DECODER},
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "image_token_index": 127,
            "vision_feature_layer": -1,
        },
        LABELLED,
    ),
    # series
    "patchtst": (
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 32,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "prediction_length": 8,
        },
        {"past_values": image(2, 32, 3), "future_values": image(2, 8, 3)},
    ),
}


def cases() -> list[Case]:
    """Returns one case for each architecture."""
    return [
        Case(f"hf/{name}", hugging_face(model, config, **sizes), kwargs=inputs)
        for name, (model, config, sizes, inputs) in TABLE.items()
    ]
