"""Nested arguments and results, with the path of each leaf."""

import torch


def tree_map(function, value, path=""):
    """`function(path, leaf)` over nested tuples, lists and mappings (model outputs too), of the same types."""
    if isinstance(value, dict):
        items = {key: tree_map(function, item, f"{path}.{key}") for key, item in value.items()}
        return type(value)(**items) if type(value) is not dict else items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(tree_map(function, item, f"{path}[{i}]") for i, item in enumerate(value)))
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(tree_map(function, item, f"{path}[{i}]") for i, item in enumerate(value))
    return function(path, value)


def leaves(value):
    found = []
    tree_map(lambda _, leaf: found.append(leaf), value)
    return found
