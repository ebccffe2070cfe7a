"""What stands for the code of every leaf: a compressor, or a policy; all methods ask alike."""

import jax.numpy as jnp
import optax
import pytest

import jaxcomp
from jaxcomp.compressors.policies import policy_of
from tests.helpers.replicas import mesh_of, transform

METHODS = {
    "compressed_mean": lambda code: jaxcomp.compressed_mean(code, "replica"),
    "cocktail_sgd": lambda code: jaxcomp.cocktail_sgd(optax.sgd(0.1), "replica", compressor=code),
    "slamb": lambda code: jaxcomp.slamb(0.1, "replica", compressor=code, exact_numel=0),
    "one_bit_adam": lambda code: jaxcomp.one_bit_adam(
        0.1, "replica", freeze_step=1, compressor=code
    ),
    "one_bit_lamb": lambda code: jaxcomp.one_bit_lamb(
        0.1, "replica", freeze_step=1, compressor=code
    ),
    "zero_one_adam": lambda code: jaxcomp.zero_one_adam(0.1, "replica", compressor=code),
    "sharded gradients": lambda code: jaxcomp.sharded_optimizer(
        optax.sgd(0.1), "replica", gradients=code
    ),
    "sharded differences": lambda code: jaxcomp.sharded_optimizer(
        optax.sgd(0.1), "replica", differences=code
    ),
}
OTHERS = {
    "slamb drifts": lambda code: jaxcomp.slamb(0.1, "replica", drift_compressor=code),
    "qsdp weights": lambda code: jaxcomp.qsdp("replica", code),
    "qsdp gradients": lambda code: jaxcomp.qsdp("replica", gradients=code),
    "qsdp fast gradients": lambda code: jaxcomp.qsdp("replica", fast_gradients=code),
}


@pytest.mark.parametrize("method", [*METHODS, *OTHERS])
@pytest.mark.parametrize("code", [4, 0, "quantize(4)"])
def test_what_is_neither_is_refused_when_a_method_is_made(method, code):
    text = rf"got {code!r} to send by; needs a Compressor, or a policy .* write quantize\(4\)"
    with pytest.raises(ValueError, match=text.replace("(4)' ", r"\(4\)' ")):
        (METHODS | OTHERS)[method](code)


@pytest.mark.parametrize("method", METHODS)
def test_an_exchange_alone_is_refused_by_what_to_write(method):
    text = r"got gathered without a code; write gathered\(quantize\(4\)\)"
    with pytest.raises(ValueError, match=text):
        METHODS[method](jaxcomp.gathered)


def test_owners_need_an_exchange_by_owners():
    code = jaxcomp.gathered(jaxcomp.quantize(4))
    with pytest.raises(ValueError, match=r"gathered\(quantize\(4\)\).* write two_shot\(quantize"):
        METHODS["sharded differences"](code)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("answer", [4, None])
def test_a_policy_that_returns_something_else_is_told_with_the_leaf(method, answer):
    tx, params = METHODS[method](lambda path, leaf: answer), {"out": jnp.ones((64, 64))}
    text = rf"the policy returned {answer} for the leaf 'out'; needs a Compressor; write quantize"
    with pytest.raises(ValueError, match=text):
        init, update = transform(tx, mesh_of(2), params)
        update({"out": jnp.ones((2, 64, 64))}, init(params), params)


def test_a_compressor_is_the_policy_of_every_leaf_and_a_policy_is_itself():
    assert policy_of(jaxcomp.sign())("any", None) == jaxcomp.sign()
    rules = jaxcomp.by_path(("in", jaxcomp.quantize(8)), (".*", jaxcomp.quantize(4)))
    assert [policy_of(rules)(path, None).name for path in ("in", "out")] == [
        "quantize(8)",
        "quantize(4)",
    ]
