"""The parts of the main example, small and quick."""

import json

import jax
import numpy as np
import pytest
import torch

from examples import digits

from ..helpers import assert_trees_equal


pytestmark = pytest.mark.slow


SMALL = digits.Settings(epochs=1, batch_size=64)


@pytest.fixture(autouse=True)
def promotion():
    """optax needs JAX's standard promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def data():
    return digits.load_digits(seed=0)


def mesh(devices):
    return jax.set_mesh(jax.make_mesh((devices,), ("batch",), devices=jax.devices()[:devices]))


def test_digits_are_split_into_distinct_images(data):
    train, test = data
    assert train.images.shape == (1437, 1, 8, 8)
    assert test.images.shape == (360, 1, 8, 8)
    assert train.images.min() == 0
    assert train.images.max() == 1
    assert set(test.labels) == set(range(10))


def test_batches_hold_each_image_once_an_epoch(data):
    train, _ = data
    numbered = digits.Digits(train.images, np.arange(len(train.labels)))
    batches = digits.make_batches(numbered, SMALL)
    seen = np.concatenate([batch.labels for batch in batches])
    assert len(seen) == len(set(seen)) == 1437 // 64 * 64
    assert_trees_equal(batches[3].images, train.images[batches[3].labels], exact=True)


def test_on_one_device_without_dropout_losses_are_those_of_torch(data):
    train, test = data
    settings = digits.Settings(epochs=1, batch_size=64, dropout=0.0)
    batches = digits.make_batches(train, settings)[:6]
    network = digits.make_network(settings)
    with mesh(1):
        by_jax = digits.train_with_jax(network, batches, test, settings)
    by_torch = digits.train_with_torch(network, batches, test, settings)
    # Adam divides gradients by their own size, and so makes small differences larger.
    assert_trees_equal(by_jax.losses, by_torch.losses, rtol=5e-5)
    assert_trees_equal(by_jax.accuracy, by_torch.accuracy, atol=1 / 360)


def test_both_trainings_leave_the_network_as_it_is(data):
    train, test = data
    batches = digits.make_batches(train, SMALL)[:1]
    network = digits.make_network(SMALL)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with mesh(4):
        digits.train_with_jax(network, batches, test, SMALL)
    digits.train_with_torch(network, batches, test, SMALL)
    assert_trees_equal(dict(network.state_dict()), before, exact=True)
    assert network.training


def test_on_four_devices_the_loss_decreases(data):
    train, test = data
    batches = digits.make_batches(train, SMALL)[:10]
    with mesh(4):
        record = digits.train_with_jax(digits.make_network(SMALL), batches, test, SMALL)
    assert len(record.losses) == len(record.seconds) == 10
    calls = [(call.device, call.kind) for call in record.calls.events]
    once = [(f"cpu:{i}", kind) for i in range(4) for kind in ("forward", "backward")]
    assert sorted(calls) == sorted(digits.TIMED_STEPS * once)
    assert np.mean(record.losses[-3:]) < 0.7 * record.losses[0]
    assert record.accuracy > 0.5


def test_main_prints_one_table_and_draws(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(digits, "PICTURE", tmp_path / "out" / "digits.png")
    digits.main(digits.Settings(epochs=1, batch_size=256))
    output = capsys.readouterr()
    header, *rows = output.out.strip().splitlines()[:3]
    assert header.split() == ["trained", "by", "test", "accuracy", "seconds", "per", "step"]
    assert [row.split("  ")[0] for row in rows] == ["JAX on 4 devices", "torch on 1 device"]
    assert "5/5" not in output.err  # progress bars, as this is no terminal
    for name in ("digits.png", "digits_timeline.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out" / "digits_timeline.json").read_text())["traceEvents"]
    assert torch.get_num_threads() == 1


def test_smoothing_keeps_exponential_decay():
    losses = list(np.exp(-0.1 * np.arange(50)))
    inner = slice(0, -10)  # at the end there are no steps on the other side
    assert_trees_equal(digits.smoothed(losses)[inner], np.array(losses)[inner])
