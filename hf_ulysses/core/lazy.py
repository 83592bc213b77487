"""Model outputs whose shards become whole when somebody reads them, and not before.

`whole_when_read(output, names, gather)` makes an output an instance of a subclass of its own class: reading a field in
`names`, as an attribute, by key, by place or through `items()`, gathers it then, once. Gathering is collective; all ranks
of a group run the same code outside of the model, so all of them read or none; if not, `agree` says so.
"""

import functools
from collections import OrderedDict
from types import SimpleNamespace


def whole_when_read(output, names, gather, agree, only_when_named=lambda: False):
    """Returns `output`, a `ModelOutput`, changed in place.

    Args:
        names (`list[str]`): its fields that hold shards.
        gather (`Callable`): a field's name and value -> the value of whole rows.
        agree (`Callable`): called with the names of the fields that are read, before they are gathered.
        only_when_named (`Callable`): whether fields that nobody has asked for by name are left out of `items()`, places
            and the like, as in an evaluation that only wants the loss.
    """
    # Beside the fields, which a `ModelOutput` keeps as a dictionary: not one of them.
    vars(output)["ulysses"] = SimpleNamespace(
        shards=set(names), gather=gather, agree=agree, only_when_named=only_when_named
    )
    output.__class__ = _lazy(type(output))
    return output


@functools.cache
def _lazy(cls):
    def resolve(self, *names):
        lazy = self.__dict__.get("ulysses")
        if lazy is None or lazy.shards.isdisjoint(names):
            return
        names = sorted(lazy.shards.intersection(names))
        lazy.agree(", ".join(names))
        lazy.shards.difference_update(names)
        for name in names:
            self[name] = lazy.gather(name, OrderedDict.__getitem__(self, name))

    def fields(self):
        lazy = self.__dict__.get("ulysses")
        if lazy is None:  # Made from one that has been read.
            return list(cls.keys(self))
        if lazy.only_when_named():
            return [key for key in cls.keys(self) if key not in lazy.shards]
        resolve(self, *lazy.shards)
        return list(cls.keys(self))

    class WholeWhenRead(cls):
        def __getattribute__(self, name):
            if not name.startswith("_"):
                resolve(self, name)
            return super().__getattribute__(name)

        def __getitem__(self, key):
            if not isinstance(key, str):
                return self.to_tuple()[key]
            resolve(self, key)
            return OrderedDict.__getitem__(self, key)

        def get(self, key, default=None):
            return self[key] if key in self else default

        def items(self):
            return [(key, OrderedDict.__getitem__(self, key)) for key in fields(self)]

        def values(self):
            return [OrderedDict.__getitem__(self, key) for key in fields(self)]

        def to_tuple(self):
            return tuple(OrderedDict.__getitem__(self, key) for key in fields(self))

        def __reduce__(self):
            fields(self)
            self.__class__ = cls
            return cls.__reduce__(self)

    WholeWhenRead.__name__, WholeWhenRead.__qualname__ = cls.__name__, cls.__qualname__
    return WholeWhenRead
