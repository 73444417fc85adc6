"""Rules by which the parameters of a language model lie on a mesh."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp.kernels.sphere import path_str

#: Kernels (in, out) whose inputs are split, as the outputs of those before them are.
#: Attention's last is not of them: its inputs are as few as its outputs, and a TPU's
#: compiler would draw its directions as it does those of the others, which have its shape.
_AFTER = ("mlp/down/kernel",)
#: Kernels, and tables whose rows are read: all that grows with the width and is split.
_SPLIT = ("kernel", "tokens", "positions", "types", "decoder")


def shardings(params: Any, mesh: Mesh, *, axis: str | tuple[str, ...] = "model") -> Any:
    """Returns where to put the parameters of a language model, to share its memory.

    Kernels are split by their outputs (heads, units), tables by their columns, and the last
    kernel of an MLP by its inputs (Megatron-LM's rule), so that its many units are never
    gathered. Leaves of layers are never split along the layers. Biases, norms, adapters and
    a classifier's last kernel are small and lie on every device.

    Args:
      params: of a :class:`LanguageModel`: arrays or ``jax.ShapeDtypeStruct``; only shapes
        are read.
      mesh: of the run, as ``jaxdp.fit`` takes it.
      axis: the mesh's axis, or axes, over which parameters are split.

    Returns:
      A tree like ``params`` of ``NamedSharding``, for ``jax.device_put``.

    Raises:
      ValueError: the mesh has no such axis; a leaf is named whose axis it does not divide.

    Source: Shoeybi et al., Megatron-LM, 2019, section 3.

    Example:
      >>> import jax
      >>> from jaxdp.models import language
      >>> model = language.LanguageModel(config=language.tiny_config("opt"))
      >>> params = jax.eval_shape(model.init, jax.random.key(0))
      >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
      >>> places = language.shardings(params, mesh)
      >>> places["layers"]["mlp"]["down"]["kernel"].spec
      PartitionSpec(None, 'model', None)
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    if not set(axes) <= set(mesh.axis_names):
        raise ValueError(
            f"axis must be of the mesh {dict(mesh.shape)}, got {axis!r}: one of "
            f"{mesh.axis_names}, or several"
        )
    parts = int(np.prod([mesh.shape[name] for name in axes]))

    def place(path: Any, leaf: Any) -> NamedSharding:
        name, spec = path_str(path), [None] * np.ndim(leaf)
        small = name == "classifier/output/kernel" or "/lora/" in name
        if small or name.rpartition("/")[2] not in _SPLIT:
            return NamedSharding(mesh, PartitionSpec())
        which = -2 if name.endswith(_AFTER) else -1
        if np.shape(leaf)[which] % parts:
            raise ValueError(
                f"params must have axes that {parts} devices along {axis!r} divide, got "
                f"the leaf {name!r} of shape {np.shape(leaf)} on the mesh "
                f"{dict(mesh.shape)}: take fewer along that axis"
            )
        spec[which] = axis  # pyright: ignore[reportArgumentType, reportCallIssue]
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(place, params)
