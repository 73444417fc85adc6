"""Makes the golden files in `peft/`: adapters that `peft` wrote, and what it computes.

    pip install '.[parity]'
    python -m tests.models.language.golden.make_peft

For each case, the folder beside it of the same name has the weights: an adapter of queries
and values of rank 2, with random numbers, in `adapter_config.json` and
`adapter_model.safetensors`; and `expected.npz` with `tokens`, `mask` and the float32
`logits`, zero where the mask is False. Where queries, keys and values are one module, as in
`phi3`, the rank is 4: the first half acts on queries, the second on values.
"""

import pathlib

import numpy as np
import peft  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from tests.models.language.golden.make_golden import CASES, LENGTHS, make_tokens, run

HERE = pathlib.Path(__file__).resolve().parent
FUSED = {"phi3": ["qkv_proj"], "modernbert_mlm": ["Wqkv"]}
MODULES = FUSED | {"roberta_mlm": ["query", "value"]}
CASES_OF = ("opt", "roberta_mlm", "llama", "gemma3", *FUSED)


def adapted(model, case: str, rng: np.random.Generator):
    """The model with an adapter of random numbers."""
    fused = case in FUSED
    options = peft.LoraConfig(
        r=4 if fused else 2,
        lora_alpha=10 if fused else 5,
        target_modules=MODULES.get(case, ["q_proj", "v_proj"]),
    )
    model = peft.get_peft_model(model, options).eval()
    options.base_model_name_or_path = case  # Not where it lies on this machine.
    with torch.no_grad():
        for key, weight in sorted(model.named_parameters()):
            if "lora_" not in key:
                continue
            values = 0.3 * rng.standard_normal(tuple(weight.shape))
            if fused and "lora_B" in key:
                config = model.config
                size = config.hidden_size // config.num_attention_heads
                queries = size * config.num_attention_heads
                heads = getattr(config, "num_key_value_heads", None)
                keys = size * heads if heads else queries
                values[:queries, 2:] = values[queries:, :2] = 0
                values[queries:-keys] = 0
            weight.copy_(torch.from_numpy(values.astype(np.float32)))
    return model


def main() -> None:
    torch.set_num_threads(1)
    for seed, case in enumerate(CASES_OF):
        rng = np.random.default_rng(seed)
        kind = getattr(transformers, CASES[case][0])
        base = kind.from_pretrained(
            HERE / case, dtype=torch.float32, attn_implementation="eager"
        )
        model = adapted(base, case, rng)
        tokens, mask = make_tokens(rng, LENGTHS, max(LENGTHS))
        logits = np.where(mask[..., None], run(model, tokens, mask), 0.0)
        folder = HERE / "peft" / case
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        (folder / "adapter_model.safetensors").chmod(0o644)
        np.savez_compressed(
            folder / "expected.npz",
            tokens=tokens,
            mask=mask,
            logits=logits.astype(np.float32),
        )


if __name__ == "__main__":
    main()
