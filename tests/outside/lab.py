"""Parts of published methods, as a researcher writes them in one file of their own."""

# pyright: reportIncompatibleVariableOverride=false, reportArgumentType=false

from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax

from mlp_research import (
    TRACED,
    AdamConfig,
    CrossEntropy,
    Fraction,
    NonNegativeFloat,
    Objective,
    OptimizerConfig,
    PositiveFloat,
    SGDConfig,
    example_keys,
    summed,
)


class Mixup(CrossEntropy, frozen=True):
    """Pairs of images and of labels, mixed (Zhang et al. 2018)."""

    kind: Literal["mixup"] = "mixup"
    alpha: Annotated[PositiveFloat, TRACED] = 0.2

    def batch(self, model, images, labels, *, key):
        pair_key, share_key, model_key = jr.split(key, 3)
        other = jr.permutation(pair_key, len(labels))
        share = jr.beta(share_key, self.alpha, self.alpha)
        mixed = share * images + (1 - share) * images[other]
        loss, measured = super().batch(model, mixed, labels, key=model_key)
        of_other, _ = super().batch(model, mixed, labels[other], key=model_key)
        return share * loss + (1 - share) * of_other, measured


class VAT(CrossEntropy, frozen=True):
    """Virtual adversarial training (Miyato et al. 2019, equations 5 to 12), one power step."""

    kind: Literal["vat"] = "vat"
    radius: Annotated[PositiveFloat, TRACED] = 2.0

    def example(self, model, image, label, *, key):
        start_key, model_key = jr.split(key)
        logits = model(image, key=model_key)

        def divergence(shift):
            moved = jax.nn.log_softmax(model(image + shift, key=model_key))
            return optax.losses.kl_divergence(moved, jax.lax.stop_gradient(jax.nn.softmax(logits)))

        start = jr.normal(start_key, image.shape)
        curved = jax.jvp(jax.grad(divergence), (jnp.zeros_like(image),), (start,))[1]
        shift = jax.lax.stop_gradient(self.radius * curved / (optax.tree.norm(curved) + 1e-12))
        return self.loss(logits, label) + divergence(shift), self.measured(logits, label)


class SAM(CrossEntropy, frozen=True):
    """Sharpness-aware minimisation (Foret et al. 2021, equation 2)."""

    kind: Literal["sam"] = "sam"
    rho: Annotated[PositiveFloat, TRACED] = 0.05

    def gradients(self, model, images, labels, *, key):
        here, ascent = super().gradients(model, images, labels, key=key)
        shift = optax.tree.scale(self.rho / optax.tree.norm(ascent), ascent)
        return here, super().gradients(eqx.apply_updates(model, shift), images, labels, key=key)[1]


class DPSGD(CrossEntropy, frozen=True):
    """Clipped gradients of the examples, and noise (Abadi et al. 2016, algorithm 1)."""

    kind: Literal["dp-sgd"] = "dp-sgd"
    bound: Annotated[PositiveFloat, TRACED] = 1.0
    noise: Annotated[NonNegativeFloat, TRACED] = 1.1

    def gradients(self, model, images, labels, *, key):
        def one(image, label, key):
            found, g = gradient(model, image, label, key=key)
            return found, optax.tree.scale(jnp.minimum(1, self.bound / optax.tree.norm(g)), g)

        gradient = eqx.filter_value_and_grad(self.example, has_aux=True)
        keys = example_keys(key, len(labels))
        (losses, measured), clipped = jax.vmap(one)(images, labels, keys)
        total = jax.tree.map(lambda g: g.sum(axis=0), clipped)
        noise = optax.tree.random_like(jr.fold_in(key, len(labels)), total)
        noisy = optax.tree.add_scale(total, self.noise * self.bound, noise)
        return (losses.mean(), summed(measured)), optax.tree.scale(1 / len(labels), noisy)


class Focal(Objective, frozen=True):
    """Cross-entropy times (1 - p)^gamma (Lin et al. 2017, equation 4); measures p."""

    kind: Literal["focal"] = "focal"
    gamma: Annotated[NonNegativeFloat, TRACED] = 2.0

    def loss(self, logits, label):
        log_p = jax.nn.log_softmax(logits)[label]
        return -((1 - jnp.exp(log_p)) ** self.gamma) * log_p

    def measure(self, logits, label):
        return {"confidence": jax.nn.softmax(logits)[label]}


class SquaredError(Objective, frozen=True):
    """Squared distance to the one-hot label (Hui and Belkin 2021)."""

    kind: Literal["squared-error"] = "squared-error"

    def loss(self, logits, label):
        return jnp.square(logits - jax.nn.one_hot(label, len(logits))).mean()


class Muon(OptimizerConfig, frozen=True):
    """Orthogonalised momentum for hidden matrices (Jordan et al. 2024), Adam for all else."""

    kind: Literal["muon"] = "muon"

    def transformation(self, learning_rate):
        def rule(path, leaf, last):
            return "muon" if leaf.ndim == 2 and 0 < path[1].idx < last else "adam"

        def rules(parameters):
            last = len(parameters.layers) - 1
            return jax.tree_util.tree_map_with_path(lambda p, leaf: rule(p, leaf, last), parameters)

        muon, adam = optax.contrib.muon(learning_rate), optax.adam(learning_rate)
        return optax.multi_transform({"muon": muon, "adam": adam}, rules)


class ScheduleFree(OptimizerConfig, frozen=True):
    """Schedule-free AdamW (Defazio et al. 2024): the average is evaluated."""

    kind: Literal["schedule-free"] = "schedule-free"
    weight_decay: Annotated[NonNegativeFloat, TRACED] = 0.0

    def transformation(self, learning_rate):
        return optax.contrib.schedule_free_adamw(learning_rate, weight_decay=self.weight_decay)

    def evaluated(self, parameters, state):
        return optax.contrib.schedule_free_eval_params(state, parameters)


class AveragedAdam(AdamConfig, frozen=True):
    """Adam; the exponential moving average of its weights is evaluated (Polyak and Juditsky)."""

    kind: Literal["averaged-adam"] = "averaged-adam"
    decay: Annotated[Fraction, TRACED] = 0.9

    def transformation(self, learning_rate):
        def average(updates, mean, parameters):
            after = optax.apply_updates(parameters, updates)
            return updates, optax.incremental_update(after, mean, 1 - self.decay)

        averaging = optax.GradientTransformation(lambda parameters: parameters, average)
        return optax.chain(super().transformation(learning_rate), averaging)

    def evaluated(self, parameters, state):
        return state[-1]


class MaxNormSGD(SGDConfig, frozen=True):
    """SGD whose units' weights are never longer than a bound (Srivastava et al. 2014, 5.1)."""

    kind: Literal["max-norm-sgd"] = "max-norm-sgd"
    max_norm: Annotated[PositiveFloat, TRACED] = 2.0

    def transformation(self, learning_rate):
        def bounded(update, weight):
            after = weight + update
            norms = jnp.linalg.norm(after, axis=-1, keepdims=True)
            scaled = after * jnp.minimum(1, self.max_norm / norms) - weight
            return scaled if weight.ndim == 2 else update

        bound = optax.stateless(lambda updates, weights: jax.tree.map(bounded, updates, weights))
        return optax.chain(super().transformation(learning_rate), bound)


class LayerwiseAdam(AdamConfig, frozen=True):
    """Adam whose rate falls by a factor from each layer to the one before (Howard and Ruder)."""

    kind: Literal["layerwise-adam"] = "layerwise-adam"
    factor: Annotated[PositiveFloat, TRACED] = 0.4

    def transformation(self, learning_rate):
        def depths(parameters):
            last = len(parameters.layers) - 1
            return jax.tree_util.tree_map_with_path(lambda path, _: last - path[1].idx, parameters)

        rates = [learning_rate * self.factor**depth for depth in range(8)]
        return optax.multi_transform({d: optax.adam(rate) for d, rate in enumerate(rates)}, depths)
