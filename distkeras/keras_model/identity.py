"""What a model is known by when a job goes on in another process: its configuration, without what changes by chance."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import Any

from distkeras.ps.protocol.layout import Layout

#: Parts of a configuration that follow from others, or differ from one process to the next.
_LEFT_OUT = {"build_config", "build_input_shape", "compile_config", "module", "seed", "shared_object_id"}
#: Where a configuration refers to layers by their names.
_REFERENCES = {"name", "keras_history", "input_layers", "output_layers"}


def model_identity(model_file: bytes) -> dict[str, Any]:
    """The configuration in a ``.keras`` archive, JSON-ready, with layers numbered instead of named.

    Keras numbers the names that it gives by what a process has built before, so the same code makes "dense" once and
    "dense_7" another time. What is None is left out: a later version of Keras may have more of it.
    """
    with zipfile.ZipFile(BytesIO(model_file)) as archive:
        config = json.loads(archive.read("config.json"))
    names: dict[str, str] = {}
    for name in _layer_names(config):
        names.setdefault(name, f"#{len(names)}")
    identity: dict[str, Any] = _canonical(config, names, reference=False)
    return identity


def layout_identity(layout: Layout) -> list[list[Any]]:
    """Each variable's own name and shape, JSON-ready."""
    return [[name.rsplit("/", 1)[-1], list(shape)] for name, shape in zip(layout.names, layout.shapes, strict=True)]


def _layer_names(node: Any) -> Iterator[str]:
    """In the order of their first appearance, layers and models within others included."""
    if isinstance(node, Mapping):
        config = node.get("config")
        # Other objects have names too, which are no accident: losses, dtype policies.
        if isinstance(config, Mapping) and not config.keys().isdisjoint(("trainable", "batch_shape", "layers")):
            yield str(config.get("name"))
        for value in node.values():
            yield from _layer_names(value)
    elif isinstance(node, list):
        for value in node:
            yield from _layer_names(value)


def _canonical(node: Any, names: Mapping[str, str], *, reference: bool) -> Any:
    if isinstance(node, Mapping):
        return {
            key: _canonical(value, names, reference=reference or key in _REFERENCES)
            for key, value in node.items()
            if key not in _LEFT_OUT and value is not None
        }
    if isinstance(node, list):
        return [_canonical(value, names, reference=reference) for value in node]
    return names.get(node, node) if reference and isinstance(node, str) else node
