"""Multilayer perceptrons in JAX and Equinox: research whose numbers can be believed."""

from mlp_research import contracts

contracts.install()
