"""Exceptions from the general rules of `tiny`, by model type or config class."""

from typing import Any

KEPT = {"id2label", "label2id", "problem_type", "dtype", "transformers_version", "architectures"}
"""Attributes that are never changed."""

THREE_POSITIONS = {
    "cosmos3_edge_text": "interleaved",
    "ernie4_5_vl_moe_text": "blocks",
    "glm4v_text": "blocks",
    "glm4v_moe_text": "blocks",
    "glm_ocr_text": "blocks",
    "paddleocr_vl_text": "blocks",
    "qwen2_5_omni_text": "blocks",
    "qwen2_5_vl_text": "blocks",
    "qwen2_vl_text": "blocks",
    "qwen3_omni_moe_text": "interleaved",
    "qwen3_vl_text": "interleaved",
    "qwen3_vl_moe_text": "interleaved",
}
"""Text models whose rotary tables are divided among time, height and width."""

_VISUAL_TOKENIZER = {
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "num_embeddings": 16,
    "codebook_size": 16,
    "latent_channels": 32,
}
_SPEECH_TOKENIZER = {
    "num_filters": 8,
    "depths": [1, 1, 1],
    "downsampling_ratios": [2, 4],
    "hidden_size": 16,
}

_PINPOINTS = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}

_BOTH_ATTENTIONS = ["sliding_attention", "full_attention"]

CONFIG_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "bit": {"num_groups": 4, "embedding_size": 16, "hidden_sizes": [16, 32, 48, 64]},
    "chameleon": {
        "vocabulary_map": {"<image>": 8}
        | {f"IMGIMG{''.join('ABCDEFGHIJ'[int(c)] for c in str(n))}Z": 9 + n for n in range(16)}
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
            }
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "topk_method": "greedy"},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": _BOTH_ATTENTIONS * 2,
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.95, 0.0] * 2,
    },
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [24, 64]},
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [24, 64]},
    "llama4_vision_model": {
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
    },
    "llava_next": _PINPOINTS,
    "llava_next_video": _PINPOINTS,
    "llava_onevision": _PINPOINTS,
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1]},
    "vipllava": {"vision_feature_layer": [-1, -2]},
    "granite4_vision": _PINPOINTS
    | {
        "downsample_rate": "2/4",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1, 1, 1, 1],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 1,
    },
    "radio": {
        "video_temporal_patch_size": 2,
        "max_img_size": 64,
        "patch_dim": 192,
        "video_patch_dim": 384,
    },
    "blip-2": {"image_token_index": 5},
    "blt": {"encoder_hash_byte_group_vocab": 64, "vocab_size": 260, "num_hidden_layers": 2},
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [64, 32]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 64},
    "reformer": {
        "axial_pos_shape": (4, 4),
        "axial_pos_embds_dim": (16, 48),
        "attn_layers": ("local", "lsh"),
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "feed_forward_size": 64,
        "hash_seed": 0,
        "num_buckets": 4,
    },
    "xlstm": {
        "qk_dim_factor": 1.0,
        "mode": "train",
        "chunkwise_kernel": "parallel--native_autograd",
        "chunk_size": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "blt_patcher": {"vocab_size": 260},
    "blt_local_encoder": {"vocab_size": 260},
    "blt_local_decoder": {"vocab_size": 260},
    "cpmant": {"dim_ff": 128, "prompt_length": 4, "prompt_types": 4, "segment_types": 4},
    "ctrl": {"dff": 128},
    "cvt": {"embed_dim": [16, 48, 96], "num_heads": [1, 3, 6], "depth": [1, 2, 3]},
    "convnext": {"hidden_sizes": [16, 32, 64, 96], "depths": [1, 1, 2, 1]},
    "convnextv2": {"hidden_sizes": [16, 32, 64, 96], "depths": [1, 1, 2, 1]},
    "distilbert": {"dim": 64, "hidden_dim": 128},
    "donut-swin": {"num_heads": [2, 4, 8, 16], "embed_dim": 16, "window_size": 2},
    "dots3_note_text": {
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "head_dim": 32,
        "index_topk": 8,
    },
    "efficientnet": {
        "image_size": 32,
        "width_coefficient": 0.25,
        "depth_coefficient": 0.3,
        "in_channels": [32, 16, 24, 40, 80, 112, 192],
        "out_channels": [16, 24, 40, 80, 112, 192, 320],
        "hidden_dim": 320,
    },
    "emu3_vqgan": _VISUAL_TOKENIZER | {"embed_dim": 4, "latent_channels": 4, "hidden_size": 32},
    "chameleon_vqgan": _VISUAL_TOKENIZER | {"embed_dim": 32},
    "janus_vqgan": _VISUAL_TOKENIZER,
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "emu3": {
        "vocabulary_map": {"<image>": 8, "<|extra_200|>": 7}
        | {f"<|visual token {n:06}|>": 10 + n for n in range(16)}
    },
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "focalnet": {"embed_dim": 16, "image_size": 32},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "hgnet_v2": {
        "stem_channels": [3, 8, 16],
        "stage_in_channels": [16, 24, 32, 48],
        "stage_mid_channels": [8, 8, 16, 16],
        "stage_out_channels": [24, 32, 48, 64],
        "stage_num_blocks": [1, 1, 1, 1],
        "hidden_sizes": [24, 32, 48, 64],
    },
    "hiera": {"embed_dim": 16, "image_size": [32, 32], "depths": [1, 1, 2, 1]},
    "levit": {"image_size": 64, "hidden_sizes": [16, 32, 48], "patch_size": 16},
    "longcat_flash": {"head_dim": 8, "expert_ffn_hidden_size": 64, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mimi": {"hidden_size": 32, "num_filters": 8, "upsample_groups": 32},
    "mobilenet_v1": {"depth_multiplier": 0.125, "image_size": 32},
    "mobilenet_v2": {"depth_multiplier": 0.125, "image_size": 32},
    "mobilevit": {
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64],
        "image_size": 64,
    },
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "nemotron": {"num_key_value_heads": 2},
    "perceiver": {
        "num_latents": 8,
        "d_latents": 32,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 1,
        "output_num_channels": 16,
        "max_position_embeddings": 16,
        "image_size": 16,
    },
    "pp_lcnet": {
        "block_configs": [
            [[3, 16, 16, 1, False]],
            [[3, 16, 32, 2, False]],
            [[3, 32, 32, 2, False]],
            [[3, 32, 48, 2, False]],
            [[5, 48, 64, 2, True]],
        ],
        "class_expand": 64,
    },
    "segformer": {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]},
    "swin": {"embed_dim": 16, "num_heads": [2, 4, 8, 16], "window_size": 2},
    "swinv2": {"embed_dim": 16, "num_heads": [2, 4, 8, 16], "window_size": 2},
    "textnet": {"stem_out_channels": 16},
    "vibevoice_acoustic_tokenizer": _SPEECH_TOKENIZER,
    "vibevoice_acoustic_tokenizer_encoder": _SPEECH_TOKENIZER,
    "vibevoice_semantic_tokenizer_encoder": _SPEECH_TOKENIZER,
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 4,
    },
}

INPUT_EXCEPTIONS: dict[str, Any] = {}
"""Functions from a model to the `Attempt` that fits it."""
