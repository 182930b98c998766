"""Many training steps of a Keras model on PyTorch, with one transfer to the device and one back.

Importing this module does not load PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import Stack, as_weight
from distkeras.keras_model.compiled_steps import arrays_of, as_fit_packs, flat_logs, model_inputs, spans

if TYPE_CHECKING:
    import keras
    import torch

    from distkeras.data.batches import Batch


class TorchSteps:
    """A loop over ``model.train_step``, with the interface of `CompiledSteps`.

    Each step is compiled by PyTorch if, and only if, the model was compiled with ``jit_compile=True``.

    Args:
        model: built and compiled, on PyTorch, with a built optimizer, loss and metrics.
        installed: a context in which the steps are taken.
    """

    def __init__(self, model: keras.Model, installed: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._model, self._installed = model, installed
        self._step: Callable[[Any], Any] | None = None

    def run(self, batches: Sequence[Batch], metrics: Sequence[str], width: int) -> np.ndarray:
        """Take one step per mini-batch, in order; arguments, results and errors are those of `CompiledSteps.run`."""
        import torch

        with self._installed(), _training(self._model):
            rows = [row for span in spans(batches) for row in self._rows(*span, metrics)]
        numbers: np.ndarray = torch.stack(rows).cpu().numpy()
        return numbers.astype(np.float64, copy=False).reshape(-1, width)

    def logs(self, batch: Batch) -> dict[str, tuple[int | None, ...]]:
        """Take a step, and return the names that ``train_step`` reports, and of each the shape."""
        with self._installed(), _training(self._model):
            for stack, _, _ in spans([batch]):
                logs = self._logs(stack, [array[0] for array in _tensors(stack, 0, 1)])
        return {name: tuple(np.shape(value)) for name, value in logs.items()}

    def _rows(self, stack: Stack, first: int, steps: int, metrics: Sequence[str]) -> Iterator[torch.Tensor]:
        tensors = _tensors(stack, first, steps)
        dtype = "float32" if tensors[0].device.type == "mps" else "float64"  # Apple's GPUs have no float64
        for arrays in zip(*tensors, strict=True):
            yield _row_of_logs(self._logs(stack, arrays, metrics), metrics, dtype)

    def _logs(self, kind: Stack, arrays: Sequence[torch.Tensor], metrics: Sequence[str] = ()) -> dict[str, Any]:
        import torch

        model, inputs, outputs = self._model, len(kind.x), len(kind.y)
        if self._step is None:
            compiles = model.jit_compile and not model.run_eagerly
            self._step = torch.compile(model.train_step) if compiles else model.train_step
        model.reset_metrics()
        y, weight = arrays[inputs : inputs + outputs], as_weight(arrays[inputs + outputs :])
        return flat_logs(self._step(as_fit_packs(*model_inputs(model, arrays[:inputs], y, weight))), metrics)


@contextmanager
def _training(model: Any) -> Iterator[None]:
    """Put PyTorch's own layers within a model into the mode of training, as ``fit`` does."""
    model.train()
    try:
        yield
    finally:
        model.eval()


def _tensors(stack: Stack, first: int, steps: int) -> list[torch.Tensor]:
    """Return copies on the model's device: a step may change them."""
    import keras

    return [keras.ops.convert_to_tensor(array[first : first + steps]) for array in arrays_of(stack)]


def _row_of_logs(logs: Mapping[str, Any], metrics: Sequence[str], dtype: str) -> torch.Tensor:
    """Return a copy of the numbers of some metrics, in their order: the next step may change what a metric returned."""
    import keras
    import torch

    return torch.cat([keras.ops.convert_to_tensor(logs[name], dtype).detach().reshape(-1) for name in metrics])
