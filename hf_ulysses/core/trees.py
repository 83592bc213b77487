"""Nested arguments and results, with the path of each leaf."""

import torch


def tree_map(function, value, path=""):
    """`function(path, leaf)` over nested tuples, lists and mappings (model outputs too), of the same types; what has no leaf
    that changes is returned itself."""
    if isinstance(value, dict):
        places, remake = [f"{path}.{key}" for key in value], lambda items: _mapping(value, items)
        old = list(value.values())
    elif isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        places, old = [f"{path}[{i}]" for i in range(len(value))], list(value)
        remake = (lambda items: type(value)(*items)) if hasattr(value, "_fields") else type(value)
    else:
        return function(path, value)
    new = [tree_map(function, item, place) for item, place in zip(old, places)]
    return value if all(a is b for a, b in zip(old, new)) else remake(new)


def _mapping(value, items):
    items = dict(zip(value, items))
    return items if type(value) is dict else type(value)(**items)


def leaves(value):
    found = []

    def find(_, leaf):
        found.append(leaf)
        return leaf

    tree_map(find, value)
    return found
