"""Models of the transformers library, called as its users call them.

Outputs and gradients equal torch's, under `eqx.filter_jit`. Models of other kinds than those that
run by default are marked slow.
"""

import copy
import inspect
import re
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from eqx_torch import capture, from_torch, ModuleError, patch, replace_module, t2j, tree_t2j
from eqx_torch._trees import flatten, TorchObject

from ..helpers import assert_trees_equal
from ..helpers.nets_of_blocks import hooked
from ..helpers.sets import sampled
from ..helpers.transformer_models import Architecture, ARCHITECTURES


FAST = ["llama", "t5"]

transformers.logging.set_verbosity_error()


def _converted(architecture: Architecture, module: torch.nn.Module, inputs: Any) -> Any:
    """Labels are 64 bits wide in torch, and 32 in JAX unless examples say so."""
    return from_torch(module, example_kw=inputs) if "labels" in inputs else from_torch(module)


def _inexact(tree: Any) -> list[Any]:
    leaves = flatten(tree)[0]
    return [x for x in leaves if "float" in str(x.dtype)]


def _cotangents(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    generators = [torch.Generator().manual_seed(i) for i in range(len(outputs))]
    return [torch.randn(y.shape, generator=g) for y, g in zip(outputs, generators, strict=True)]


def _torch_results(module: torch.nn.Module, inputs: Any) -> Any:
    """Outputs, and the gradient of a random linear function of all of them."""
    module = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = module(**inputs)
    inexact = _inexact(outputs)
    torch.autograd.backward(inexact, _cotangents(inexact))
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    return outputs, gradients


def _arrays(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: t2j(x) if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}


@pytest.mark.parametrize("name", sampled(ARCHITECTURES, FAST))
def test_outputs_and_gradients(name):
    architecture = ARCHITECTURES[name]
    module, inputs = architecture.make(), architecture.inputs()
    expected, expected_gradients = _torch_results(module, inputs)
    cotangents = tree_t2j(_cotangents(_inexact(expected)))

    @eqx.filter_jit
    def step(model: Any, inputs: Any) -> Any:
        def loss(model: Any) -> Any:
            outputs = model(**inputs)
            pairs = zip(_inexact(outputs), cotangents, strict=True)
            return sum((jnp.sum(y * u) for y, u in pairs), jnp.zeros(())), outputs

        return eqx.filter_value_and_grad(loss, has_aux=True)(model)

    model = _converted(architecture, module, inputs)
    (_, outputs), gradients = step(model, _arrays(inputs))
    assert isinstance(outputs, type(expected))
    assert list(outputs.keys()) == list(expected.keys())
    leaves = [x.detach() for x in flatten(expected)[0]]
    assert_trees_equal(flatten(outputs)[0], leaves, rtol=1e-4, atol=1e-5)
    actual = {n: gradients.params[n] for n in expected_gradients}
    assert_trees_equal(actual, expected_gradients, rtol=1e-3, atol=1e-4)


def test_output_is_the_library_s_own():
    module = ARCHITECTURES["llama"].make()
    outputs = eqx.filter_jit(from_torch(module))(input_ids=jnp.ones((2, 6), int))
    assert isinstance(outputs, CausalLMOutputWithPast)
    assert outputs.loss is None
    assert outputs.logits is outputs["logits"]
    assert outputs.logits.shape == (2, 6, 40)
    assert isinstance(jax.tree.map(lambda x: x + 1, outputs), CausalLMOutputWithPast)


def test_single_output_is_not_searched_for_pairs():
    """`ModelOutput` takes apart a first field that can be iterated over."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x)

    outputs = eqx.filter_jit(from_torch(Model()))(jnp.ones((0, 2)))
    assert outputs.last_hidden_state.shape == (0, 2)
    assert outputs.hidden_states is None


def test_generation_with_a_cache():
    """A cache that one call returns is passed to the next, through `eqx.filter_jit`."""
    module = ARCHITECTURES["llama"].make()
    tokens = ARCHITECTURES["llama"].inputs()["input_ids"]
    model = from_torch(module)

    @eqx.filter_jit
    def step(model: Any, cache: Any, token: Any) -> Any:
        outputs = model(input_ids=token, cache=cache)
        return jnp.argmax(outputs.logits[:, -1:], axis=-1), outputs.cache

    with torch.no_grad():
        outputs = module(input_ids=tokens)
        expected, expected_cache = outputs.logits[:, -1:].argmax(-1), outputs.cache
        first = eqx.filter_jit(model)(input_ids=t2j(tokens))
        token, cache = jnp.argmax(first.logits[:, -1:], axis=-1), first.cache
        for _ in range(3):
            outputs = module(input_ids=expected, cache=expected_cache)
            expected, expected_cache = outputs.logits[:, -1:].argmax(-1), outputs.cache
            token, cache = step(model, cache, token)
            assert_trees_equal(token, expected)
    assert isinstance(expected_cache, DynamicCache)
    assert_trees_equal(cache.layers[1].keys, expected_cache.layers[1].keys)


def test_empty_cache_of_the_user_s_stays_empty():
    model = from_torch(ARCHITECTURES["llama"].make())
    ids, cache = jnp.ones((2, 6), int), DynamicCache()
    expected = model(input_ids=ids).logits
    for _ in range(2):
        outputs = model(input_ids=ids, cache=cache)
        assert_trees_equal(outputs.logits, expected)
        assert outputs.cache.layers[0].keys.shape == (2, 1, 6, 8)
    assert cache.get_seq_length() == 0


def test_cache_is_a_tree_of_arrays():
    model = from_torch(ARCHITECTURES["llama"].make())
    cache = model(input_ids=jnp.ones((2, 6), int)).cache
    assert isinstance(cache, TorchObject)
    assert repr(cache) == "TorchObject(DynamicCache, 4 arrays)"
    assert [x.shape for x in jax.tree.leaves(cache)] == [(2, 1, 6, 8)] * 4
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(cache)]
    assert paths[:2] == [".layers[0].keys", ".layers[0].values"]
    message = "stands for a `DynamicCache` of torch code .* but not `get_seq_length`"
    with pytest.raises(AttributeError, match=message):
        cache.get_seq_length()


def test_head_tied_to_the_embedding_stays_tied():
    """Three steps of an optimiser; the gradient is the sum of those of both uses."""
    architecture = ARCHITECTURES["gpt2"]
    module, inputs = architecture.make(), architecture.inputs()
    model = _converted(architecture, module, inputs)
    assert "lm_head.weight" not in model.params
    optimiser = optax.sgd(0.1)
    opt_state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    reference = torch.optim.SGD(module.parameters(), 0.1)

    @eqx.filter_jit(donate="all")
    def step(model: Any, opt_state: Any, inputs: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(lambda m: m(**inputs).loss)(model)
        updates, opt_state = optimiser.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    for _ in range(3):
        expected = module(**inputs).loss
        expected.backward()
        reference.step()
        reference.zero_grad()
        model, opt_state, loss = step(model, opt_state, _arrays(inputs))
        assert_trees_equal(loss, expected.detach(), rtol=1e-5)
    assert module.lm_head.weight is module.transformer.wte.weight
    expected_params = {name: p.detach() for name, p in module.named_parameters()}
    assert_trees_equal(model.params, expected_params, rtol=1e-4, atol=1e-5)


def test_mask_code_that_reads_values_is_batched_by_a_loop():
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = ARCHITECTURES["bert"].make()

        def forward(self, ids, mask):
            if mask.all():
                return self.bert(input_ids=ids).logits
            return self.bert(input_ids=ids, attention_mask=mask).logits

    module = Masked().eval()
    inputs = ARCHITECTURES["bert"].inputs()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    model = from_torch(module, output_shapes=jax.ShapeDtypeStruct((1, 2), np.float32))
    with pytest.warns(UserWarning, match="cannot batch `Masked`") as caught:
        batched = jax.vmap(model)(t2j(ids)[:, None], t2j(mask)[:, None])
    assert len([w for w in caught if re.search("cannot batch", str(w.message))]) == 1
    expected = torch.stack([module(i[None], m[None]) for i, m in zip(ids, mask, strict=True)])
    assert_trees_equal(batched, expected.detach())


def _block(seen: dict[str, Any]) -> str:
    """The first submodule with a number, that is called once, of those in lists of blocks."""
    numbered = [p for p, calls in seen.items() if p.split(".")[-1].isdigit() and len(calls) == 1]
    in_lists = [p for p in numbered if re.search(r"layer|block|\bh\.", p)]
    return (in_lists or numbered or list(seen))[0]


@pytest.mark.parametrize("name", sampled(ARCHITECTURES, ("bert",)))
def test_inside(name):
    """Outputs of all submodules are those that hooks see; a block is put in its own place."""
    architecture = ARCHITECTURES[name]
    module, inputs = architecture.make(), architecture.inputs()
    if "use_cache" in inspect.signature(module.forward).parameters:
        inputs["use_cache"] = False  # caches are no results that JAX can take over
    model, arrays = _converted(architecture, module, inputs), _arrays(inputs)
    assert all(model[path].core.name for path, _ in module.named_modules() if path)
    seen = hooked(module, lambda: module(**inputs))
    _, captured = capture(model, list(seen))(**arrays)
    for path, calls in seen.items():
        outputs = [captured[path]] if len(calls) == 1 else captured[path]
        for actual, (_, _, expected) in zip(outputs, calls, strict=True):
            assert_trees_equal(flatten(actual)[0], flatten(expected)[0], rtol=1e-4, atol=1e-5)
    outputs = flatten(model(**arrays))[0]
    block = _block(seen)
    part = model[block]
    patched = patch(model, {block: captured[block]})
    assert_trees_equal(flatten(patched(**arrays))[0], outputs, exact=True)
    replaced = replace_module(model, block, lambda *args, **kwargs: part(*args, **kwargs))
    assert_trees_equal(flatten(replaced(**arrays))[0], outputs, exact=True)


def test_a_cache_cannot_be_taken_over():
    architecture = ARCHITECTURES["llama"]
    model = from_torch(architecture.make())
    replaced = replace_module(model, "model.layers.0", lambda h, **_: h)
    with pytest.raises(ModuleError, match="is given a DynamicCache.*`use_cache=False`"):
        replaced(input_ids=jnp.ones((2, 6), int), use_cache=True)
