"""The zeroth-order step as the DPZero paper's code takes it, in torch, for comparison.

The same RoBERTa from the same checkpoint: parameters are perturbed in place by
``+radius z``, ``-2 radius z`` and ``+radius z``, then moved; each time the normals ``z``
are drawn again, tensor by tensor, from one seed. Needs torch and safetensors alone.
"""

import json
import math
import pathlib
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file


class Roberta:
    """Losses (B,) of a prompt over label words, from the tensors of a checkpoint."""

    def __init__(self, folder: pathlib.Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.epsilon = config["layer_norm_eps"]
        self.pad = config["pad_token_id"]
        tensors = load_file(folder / "model.safetensors")
        self.params = {
            name: x for name, x in tensors.items() if name != "lm_head.decoder.weight"
        }

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        p, mask = self.params, batch["mask"]
        names = "roberta.embeddings."
        positions = mask.long().cumsum(1) * mask + self.pad
        x = F.embedding(batch["tokens"], p[names + "word_embeddings.weight"])
        x = x + F.embedding(positions, p[names + "position_embeddings.weight"])
        x = x + p[names + "token_type_embeddings.weight"][0]
        x = self._norm(x, names + "LayerNorm")
        for i in range(self.layers):
            x = self._layer(x, mask, f"roberta.encoder.layer.{i}.")
        x = x[torch.arange(len(x)), batch["position"]]
        x = self._norm(F.gelu(self._dense(x, "lm_head.dense")), "lm_head.layer_norm")
        words = batch["words"]
        table = p["roberta.embeddings.word_embeddings.weight"][words]
        logits = F.linear(x, table, p["lm_head.bias"][words])
        return F.cross_entropy(logits, batch["label"].long(), reduction="none")

    def _layer(self, x: torch.Tensor, mask: torch.Tensor, at: str) -> torch.Tensor:
        rows, length, width = x.shape
        split = (rows, length, self.heads, width // self.heads)
        query, key, value = (
            self._dense(x, f"{at}attention.self.{name}").view(split).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        y = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask[:, None, None, :]
        )
        y = y.transpose(1, 2).reshape(x.shape)
        y = x + self._dense(y, f"{at}attention.output.dense")
        x = self._norm(y, f"{at}attention.output.LayerNorm")
        y = F.gelu(self._dense(x, f"{at}intermediate.dense"))
        return self._norm(
            x + self._dense(y, f"{at}output.dense"), f"{at}output.LayerNorm"
        )

    def _dense(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.params[f"{name}.weight"], self.params[f"{name}.bias"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        p = self.params
        return F.layer_norm(
            x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], self.epsilon
        )


def _move(model: Roberta, seed: int, scale: float) -> None:
    """Adds ``scale`` times the normals of a seed to every parameter, in place."""
    torch.manual_seed(seed)
    for x in model.params.values():
        z = torch.normal(mean=0, std=1, size=x.size(), dtype=x.dtype)
        x.add_(z, alpha=scale)


def step(
    model: Roberta,
    batch: dict[str, torch.Tensor],
    seed: int,
    *,
    radius: float,
    clip: float,
    noise: float,
    learning_rate: float,
) -> None:
    """One step: two forward passes, three perturbations in place, one update."""
    _move(model, seed, radius)
    plus = model(batch)
    _move(model, seed, -2 * radius)
    minus = model(batch)
    slopes = ((plus - minus) / (2 * radius)).clamp(-clip, clip)
    # Noise of its own generator: the released code draws it from the direction's seed.
    secret = torch.Generator().manual_seed(seed + 1)
    noised = float(slopes.mean() + noise * torch.randn((), generator=secret))
    if not math.isfinite(noised):
        raise ValueError("the losses are not finite")
    _move(model, seed, radius)
    _move(model, seed, -learning_rate * noised)


def side(folder: pathlib.Path, arrays: dict[str, Any]) -> dict[str, Any]:
    """What is timed: two forward passes, and a step; and the losses, for comparison."""
    torch.set_grad_enabled(False)
    model = Roberta(folder)
    batch = {name: torch.from_numpy(x.copy()) for name, x in arrays.items()}
    batch = {n: x.long() if x.dtype == torch.int32 else x for n, x in batch.items()}
    seeds = iter(range(10**6))
    options = {"radius": 1e-3, "clip": 1e3, "noise": 1.0, "learning_rate": 1e-6}
    return {
        "losses": lambda: model(batch).numpy(),
        "two forwards": lambda: [model(batch).sum().item() for _ in range(2)],
        "gaussian": lambda: step(model, batch, next(seeds), **options),
    }
