"""Tiny random models of the transformers library, each with inputs as its users pass them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers


VOCABULARY = 40
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How to make a model and its inputs.

    Attributes:
        model: the name of the model's class.
        config: the name of its configuration's class.
        options: of the configuration.
        inputs: makes the arguments of a call.
    """

    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]

    def make(self) -> torch.nn.Module:
        """A model with random weights, in evaluation mode as transformers makes it."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options)
        return getattr(transformers, self.model)(config).eval()


def _tokens(seed: int, length: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (2, length), generator=generator)


def _mask() -> torch.Tensor:
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    return mask


def _text() -> dict[str, Any]:
    return {"input_ids": _tokens(0), "attention_mask": _mask()}


def _labelled() -> dict[str, Any]:
    return {**_text(), "labels": _tokens(0)}


def _translation() -> dict[str, Any]:
    return {**_text(), "labels": _tokens(1, 5)}


def _pixels(channels: int = 3, size: int = 16) -> torch.Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))


def _image() -> dict[str, Any]:
    return {"pixel_values": _pixels()}


def _sound(length: int = 400) -> dict[str, Any]:
    return {"input_values": torch.randn(2, length, generator=torch.Generator().manual_seed(0))}


def _spectrogram() -> dict[str, Any]:
    features = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    return {"input_features": features, "labels": _tokens(1, 5)}


_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
}
_SPEECH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}

ARCHITECTURES = {
    # Encoders.
    "bert": Architecture("BertForSequenceClassification", "BertConfig", _SIZES, _text),
    "roberta": Architecture(
        "RobertaForMaskedLM", "RobertaConfig", {**_SIZES, "pad_token_id": 1}, _text
    ),
    "albert": Architecture(
        "AlbertForMaskedLM", "AlbertConfig", {**_SIZES, "embedding_size": 8}, _text
    ),
    "distilbert": Architecture(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
        _text,
    ),
    "electra": Architecture(
        "ElectraForPreTraining", "ElectraConfig", {**_SIZES, "embedding_size": 8}, _text
    ),
    "deberta": Architecture(
        "DebertaV2Model",
        "DebertaV2Config",
        {**_SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        _text,
    ),
    "modernbert": Architecture(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**_SIZES, "pad_token_id": 0, "local_attention": 4},
        _text,
    ),
    # Decoders; the head is tied to the embedding unless said otherwise.
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        _labelled,
    ),
    "gpt_neox": Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES, _labelled),
    "opt": Architecture(
        "OPTForCausalLM",
        "OPTConfig",
        {**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16, "pad_token_id": 1},
        _labelled,
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2},
        _labelled,
    ),
    "llama": Architecture(
        "LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "tie_word_embeddings": True}, _labelled
    ),
    "mistral": Architecture(
        "MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 4}, _labelled
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", _GROUPED, _labelled),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, "sliding_window": 4}, _labelled
    ),
    # Mixtures of experts: which expert sees a token depends on the token.
    "mixtral": Architecture(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        _labelled,
    ),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **_GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 12,
        },
        _labelled,
    ),
    # Encoder-decoders.
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        _translation,
    ),
    "bart": Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_position_embeddings": 32,
        },
        _translation,
    ),
    # Vision.
    "vit": Architecture("ViTForImageClassification", "ViTConfig", _VISION, _image),
    "swin": Architecture(
        "SwinModel",
        "SwinConfig",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 2],
            "num_heads": [1, 2],
            "window_size": 4,
        },
        _image,
    ),
    "convnext": Architecture(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
        _image,
    ),
    "clip": Architecture(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**_SIZES, "eos_token_id": 2},
            "vision_config": _VISION,
            "projection_dim": 8,
        },
        lambda: {**_text(), **_image(), "return_loss": True},
    ),
    # Speech.
    "wav2vec2": Architecture("Wav2Vec2Model", "Wav2Vec2Config", _SPEECH, _sound),
    "hubert": Architecture("HubertForCTC", "HubertConfig", _SPEECH, _sound),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 8,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        _spectrogram,
    ),
    # State spaces.
    "mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        _labelled,
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 4,
        },
        _labelled,
    ),
}
