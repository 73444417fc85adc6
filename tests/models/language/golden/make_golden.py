"""Makes the golden files beside it: what `transformers` computes on tiny checkpoints.

    pip install '.[parity]'
    python tests/models/language/golden/make_golden.py [CASE ...]

For each case a folder in Hugging Face's layout, with `config.json`, `model.safetensors`
(bfloat16 for what is younger than OPT) and `expected.npz`, which is float32. All weights
are random, biases and layer norms too (they start at zero and one, and an error in them
would not show). The arrays of `expected.npz`:

    tokens (B, L) int32, mask (B, L) bool      a batch padded on the right
    logits (B, L, V) or (B, K) float32         zero where the mask is False
    whole_tokens (B', L') int32, whole_logits  a batch without padding or mask
    targets (B, L) int32, span (B, L) bool     language models: what is scored, and where
    log_likelihood (B,) float32                sum over the span of log p(target)
    whole_targets, whole_span, whole_log_likelihood

In a masked language model the span is masked in `tokens`. In a causal one the targets
are the tokens, and p is given those before: the span is every token but the first.
"""

import json
import pathlib
import sys

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

HERE = pathlib.Path(__file__).resolve().parent
PAD, MASK, FIRST_WORD = 1, 4, 5
LENGTHS = (12, 7, 3)
WHOLE = (2, 9)

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": PAD,
    "eos_token_id": 2,
}
ROBERTA = SIZES | {
    "intermediate_size": 24,
    "max_position_embeddings": 16,  # two rows lie before the first position
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "bos_token_id": 0,
}
MODERN = SIZES | {
    "num_hidden_layers": 3,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "cls_token_id": 0,
    "sep_token_id": 2,
    "local_attention": 6,  # three to either side
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 100.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    },
}
OPT = SIZES | {
    "ffn_dim": 24,
    "max_position_embeddings": 14,  # 16 rows are stored
    "word_embed_proj_dim": 16,
    "bos_token_id": 2,
}
DECODER = SIZES | {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
}
WINDOW = {"sliding_window": 4}  # shorter than the texts, as is what scaling begins at
SCALED = {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = SCALED | {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = SCALED | {"rope_type": "yarn", "original_max_position_embeddings": 512}
LONG = {
    "short_factor": [1.0, 2.0],
    "long_factor": [3.0, 5.0],
    "partial_rotary_factor": 0.5,
}
GEMMA = DECODER | WINDOW | {"head_dim": 6, "query_pre_attn_scalar": 10}
NEAR, FAR = "sliding_attention", "full_attention"
LABELS = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}

CASES = {
    "roberta_mlm": ("RobertaForMaskedLM", ROBERTA),
    "roberta_mlm_untied": (
        "RobertaForMaskedLM",
        # An epsilon so large that it shows whether it is read.
        ROBERTA | {"tie_word_embeddings": False, "layer_norm_eps": 1e-2},
    ),
    "roberta_classifier": ("RobertaForSequenceClassification", ROBERTA | LABELS),
    "opt": ("OPTForCausalLM", OPT),
    "opt_untied": ("OPTForCausalLM", OPT | {"tie_word_embeddings": False}),
    "opt_post_norm": (
        "OPTForCausalLM",
        OPT | {"word_embed_proj_dim": 8, "do_layer_norm_before": False},
    ),
    "opt_classifier": ("OPTForSequenceClassification", OPT | LABELS),
    "llama": ("LlamaForCausalLM", DECODER),
    "llama_scaled": (
        "LlamaForCausalLM",
        DECODER
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": LLAMA3, "head_dim": 8},
    ),
    "llama_linear": (
        "LlamaForCausalLM",
        DECODER | {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama_classifier": ("LlamaForSequenceClassification", DECODER | LABELS),
    "mistral": ("MistralForCausalLM", DECODER | WINDOW),
    "qwen2": (
        "Qwen2ForCausalLM",
        DECODER | WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
    ),
    "qwen2_yarn": (
        "Qwen2ForCausalLM",
        DECODER | {"head_dim": 16, "rope_parameters": YARN},
    ),
    "qwen3": ("Qwen3ForCausalLM", DECODER | {"head_dim": 6}),
    "gemma": ("GemmaForCausalLM", DECODER | {"head_dim": 6}),
    "gemma2": (
        "Gemma2ForCausalLM",
        GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        GEMMA
        | {"layer_types": [NEAR, FAR, NEAR]}
        | {
            "rope_parameters": {
                NEAR: {"rope_type": "default", "rope_theta": 10.0},
                FAR: {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
            }
        },
    ),
    "phi3": ("Phi3ForCausalLM", DECODER | WINDOW),
    "phi3_long": (
        "Phi3ForCausalLM",
        DECODER
        | {"num_attention_heads": 2, "original_max_position_embeddings": 10}
        | {"rope_parameters": LONG | {"rope_type": "longrope", "rope_theta": 100.0}},
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        DECODER | WINDOW | {"use_sliding_window": True, "no_rope_layers": [1, 0, 1]},
    ),
    "modernbert_mlm": ("ModernBertForMaskedLM", MODERN),
    "modernbert_mlm_untied": (
        "ModernBertForMaskedLM",
        MODERN
        | {"tie_word_embeddings": False, "norm_eps": 1e-2}
        | {"num_hidden_layers": 4, "layer_types": [NEAR, FAR, NEAR, FAR]},
    ),
    "modernbert_classifier": (
        "ModernBertForSequenceClassification",
        MODERN | LABELS | {"classifier_pooling": "mean"},
    ),
}


def make_model(name: str, options: dict, rng: np.random.Generator, std: float = 0.3):
    """The model in float32 and evaluation mode, every parameter drawn anew."""
    kind = getattr(transformers, name)
    config = kind.config_class(**options)
    config._attn_implementation = "eager"
    model = kind(config).eval()
    with torch.no_grad():
        for key, weight in sorted(model.named_parameters()):
            values = std * rng.standard_normal(tuple(weight.shape))
            if "norm" in key.lower() and key.endswith("weight"):
                values += 1.0
            weight.copy_(torch.from_numpy(values.astype(np.float32)))
            if not name.startswith(("Roberta", "OPT")):
                weight.copy_(weight.bfloat16())  # so that they can be stored as such
    model.tie_weights()
    return model


def make_tokens(rng: np.random.Generator, lengths, length: int):
    """Random words, padded on the right; and the mask."""
    mask = np.arange(length) < np.array(lengths)[:, None]
    words = rng.integers(FIRST_WORD, SIZES["vocab_size"], mask.shape)
    return np.where(mask, words, PAD).astype(np.int32), mask


def run(model, tokens: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    inputs = {"input_ids": torch.from_numpy(tokens).long()}
    if mask is not None:
        inputs["attention_mask"] = torch.from_numpy(mask).long()
    with torch.no_grad():
        return model(**inputs).logits.float().numpy()


def log_likelihood(logits, targets, span) -> np.ndarray:
    """Sum over `span` of log p(target); `logits[:, t]` belong to `targets[:, t]`."""
    log_p = torch.log_softmax(torch.from_numpy(logits), dim=-1)
    index = torch.from_numpy(targets).long()[..., None]
    chosen = log_p.gather(-1, index)[..., 0].numpy()
    return np.where(span, chosen, 0.0).sum(axis=1, dtype=np.float32)


def expect(model, name: str, rng: np.random.Generator, whole: bool) -> dict:
    lengths = (WHOLE[1],) * WHOLE[0] if whole else LENGTHS
    tokens, mask = make_tokens(rng, lengths, max(lengths))
    out = {}
    if name.endswith("ForMaskedLM"):
        span = mask & (rng.random(mask.shape) < 0.4)
        span[:, 1] = True
        out = {"targets": tokens, "span": span}
        tokens = np.where(span, MASK, tokens).astype(np.int32)
    logits = run(model, tokens, None if whole else mask)
    if name.endswith("ForMaskedLM"):
        out["log_likelihood"] = log_likelihood(logits, out["targets"], out["span"])
    if name.endswith("ForCausalLM"):
        span = mask.copy()
        span[:, 0] = False
        out = {"targets": tokens, "span": span}
        shifted = np.concatenate([logits[:, :1], logits[:, :-1]], axis=1)
        out["log_likelihood"] = log_likelihood(shifted, tokens, span)
    if logits.ndim == 3:
        logits = np.where(mask[..., None], logits, 0.0).astype(np.float32)
    out |= {"tokens": tokens, "logits": logits}
    if whole:
        return {f"whole_{key}": value for key, value in out.items()}
    return out | {"mask": mask}


def main() -> None:
    torch.set_num_threads(1)
    for seed, (case, (name, options)) in enumerate(CASES.items()):
        if sys.argv[1:] and case not in sys.argv[1:]:
            continue
        rng = np.random.default_rng(seed)
        model = make_model(name, options, rng)
        folder = HERE / case
        arrays = expect(model, name, rng, False) | expect(model, name, rng, True)
        if not name.startswith(("Roberta", "OPT")):
            model = model.bfloat16()
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        np.savez_compressed(folder / "expected.npz", **arrays)


if __name__ == "__main__":
    main()
