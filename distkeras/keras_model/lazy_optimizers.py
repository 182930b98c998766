"""Optimizers that change only the rows of a table that a step touches: see `distkeras.optimizers`."""

from __future__ import annotations

from typing import Any

import keras

from distkeras.private_keras import slots_of
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import require_number


class _Lazy:
    """The common base of lazy optimizers, listed before a Keras optimizer: it finds the rows that a gradient names."""

    def __init__(self, **options: Any) -> None:
        backend = keras.backend.backend()
        if backend != "tensorflow":
            raise ConfigurationError(
                f"{type(self).__name__} needs Keras on TensorFlow, whose gradients name the rows that a step touches. "
                f"Received: backend {backend!r}"
            )
        for name in ("weight_decay", "use_ema", "gradient_accumulation_steps"):
            if options.get(name):
                raise ConfigurationError(
                    f"`{name}` must not be given to {type(self).__name__}: it would change every row at every step. "
                    f"Received: {name}={options[name]!r}"
                )
        super().__init__(**options)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update the rows that a gradient names, or else the whole variable; Keras calls this."""
        import tensorflow as tf

        if not isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]  # defined by the Keras class
            return
        rows, places = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(tf.cast(gradient.values, variable.dtype), places, tf.size(rows))
        self._update_rows(variable, rows, values, keras.ops.cast(learning_rate, variable.dtype))

    def _update_rows(self, variable: Any, rows: Any, gradient: Any, learning_rate: Any) -> None:
        """Update the rows ``rows`` of a variable, which are unique, by their gradients."""
        raise NotImplementedError


@keras.saving.register_keras_serializable("distkeras")
class LazyAdam(_Lazy, keras.optimizers.Adam):  # type: ignore[misc]  # Keras' classes have no types
    r"""Adam whose moments of a table's row change only in the steps that touch the row.

    ::

        model.compile(LazyAdam(1e-3), "binary_crossentropy")

    A step touches a row of an Embedding if an id of the mini-batch names it. For such a row with the gradient
    :math:`g`, the sum over all places of the mini-batch with its id, in the optimizer's step :math:`t`:

    .. math::
        m \leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2, \qquad
        w \leftarrow w - \alpha \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{m}{\sqrt v + \epsilon}

    All other rows keep :math:`w, m` and :math:`v`, to the bit. The bias correction counts all steps, not those that
    touch the row: the first step that touches it, if it is a late one, moves it by up to
    :math:`\alpha (1 - \beta_1) / \sqrt{1 - \beta_2}`, which is 3.2 learning rates. Variables whose gradient names no
    rows, such as the kernel of a Dense layer or a table with a regularizer, are trained by Adam.

    This is another algorithm than Adam, which continues to move a row after it was touched. It equals Adam, with the
    gradients of an id added up first, if every step touches every row.

    Args:
        learning_rate: a number, or a schedule of Keras.
        beta_1: the decay of the first moment.
        beta_2: the decay of the second moment.
        epsilon: added to the root, as Keras' Adam does.
        options: of every Keras optimizer, such as ``clipvalue``; without those that change every row.

    Raises:
        ConfigurationError: Keras runs on another backend than TensorFlow, or an option changes every row.

    References:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1 with the order of section
        2. ``LazyAdam`` of TensorFlow Addons and ``SparseAdam`` of PyTorch apply it to the rows of a gradient in this
        way, with the bias correction of all steps.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, **options)

    def _update_rows(self, variable: Any, rows: Any, gradient: Any, learning_rate: Any) -> None:
        import tensorflow as tf

        momentum, velocity = (slot.value for slot in slots_of(self, variable))
        step = tf.cast(self.iterations + 1, variable.dtype)
        decays = [tf.pow(tf.cast(beta, variable.dtype), step) for beta in (self.beta_1, self.beta_2)]
        alpha = learning_rate * tf.sqrt(1 - decays[1]) / (1 - decays[0])
        first, second = tf.gather(momentum, rows), tf.gather(velocity, rows)
        first += (gradient - first) * (1 - self.beta_1)
        second += (tf.square(gradient) - second) * (1 - self.beta_2)
        momentum.scatter_update(tf.IndexedSlices(first, rows))
        velocity.scatter_update(tf.IndexedSlices(second, rows))
        self.assign_sub(variable, tf.IndexedSlices(first * alpha / (tf.sqrt(second) + self.epsilon), rows))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        config: dict[str, Any] = super().get_config()
        del config["amsgrad"]  # its third moment is not part of this algorithm
        return config


@keras.saving.register_keras_serializable("distkeras")
class LazyMomentum(_Lazy, keras.optimizers.SGD):  # type: ignore[misc]  # Keras' classes have no types
    r"""SGD with momentum, where the velocity of a table's row acts only in the steps that touch the row.

    ::

        model.compile(LazyMomentum(0.1, momentum=0.9), "mse")

    A step touches a row of an Embedding if an id of the mini-batch names it. For such a row with the gradient
    :math:`g`, the sum over all places of the mini-batch with its id:

    .. math::
        u \leftarrow \mu u - \alpha g, \qquad w \leftarrow w + u

    or, with Nesterov's momentum, :math:`w \leftarrow w + \mu u - \alpha g` with the new :math:`u`. All other rows keep
    :math:`w` and :math:`u`, to the bit. Variables whose gradient names no rows, such as the kernel of a Dense layer or
    a table with a regularizer, are trained by SGD with momentum.

    This is another algorithm than SGD with momentum, which continues to move a row after it was touched. It equals SGD
    with momentum if every step touches every row.

    Args:
        learning_rate: a number, or a schedule of Keras.
        momentum: the decay of the velocity, more than 0 and at most 1.
        nesterov: use Nesterov's momentum.
        options: of every Keras optimizer, such as ``clipvalue``; without those that change every row.

    Raises:
        ConfigurationError: Keras runs on another backend than TensorFlow, an option changes every row, or there is no
            momentum.

    References:
        Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013, equations 1
        to 4, in the form of Keras. TensorFlow's ``MomentumOptimizer`` applies it to the rows of a gradient in this way
        (``ResourceSparseApplyKerasMomentum``).
    """

    def __init__(
        self, learning_rate: Any = 0.01, momentum: float = 0.9, nesterov: bool = False, **options: Any
    ) -> None:
        momentum = require_number("momentum", momentum)  # without one, it is SGD
        super().__init__(learning_rate=learning_rate, momentum=momentum, nesterov=nesterov, **options)

    def _update_rows(self, variable: Any, rows: Any, gradient: Any, learning_rate: Any) -> None:
        import tensorflow as tf

        velocities = slots_of(self, variable)[0].value
        step = gradient * learning_rate
        velocity = tf.gather(velocities, rows) * self.momentum - step
        velocities.scatter_update(tf.IndexedSlices(velocity, rows))
        move = velocity * self.momentum - step if self.nesterov else velocity
        self.assign_add(variable, tf.IndexedSlices(move, rows))


#: The lazy optimizers by their names in lower case, which is how Keras looks up its own.
LAZY = {kind.__name__.lower(): kind for kind in (LazyAdam, LazyMomentum)}
