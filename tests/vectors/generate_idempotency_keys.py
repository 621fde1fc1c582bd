"""Writes idempotency_keys.jsonl: payloads, and the keys that the Python package fencekit makes of them.

    python -m venv venv && venv/bin/pip install fencekit==0.6.1
    venv/bin/python tests/vectors/generate_idempotency_keys.py > tests/vectors/idempotency_keys.jsonl

The first line tells the versions and the seed; the same versions give the same file. Every other line is a vector:

    {"namespace": ..., "payload": TYPED, "canonical": ..., "key": ...}   or   {..., "error": true, "why": ...}

JSON has no way to say 1.0 rather than 1 that survives all readers, nor NaN, bytes, or a key that is no string. So a payload
is written in a typed form: null, booleans and strings stand for themselves, and

    {"i": "12"}  an integer      {"f": "1e+16"}  a float, also "nan" and "inf"      {"b": [0, 255]}  bytes
    [TYPED, ...]  a list         {"t": [TYPED, ...]}  a tuple                       {"m": [[TYPED, TYPED], ...]}  a dict
"""

import importlib.metadata
import json
import math
import platform
import random
import struct
import sys

from fencekit import canonicalize, idempotency_key
from fencekit.errors import CanonicalizeError

SEED = 2040

# The widest integers that Rust has.
LEAST, GREATEST = -(2**127), 2**128 - 1


def typed(value):
    """Returns the typed form of a value."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return {"i": str(value)}
    if isinstance(value, float):
        return {"f": repr(value)}
    if isinstance(value, bytes):
        return {"b": list(value)}
    if isinstance(value, list):
        return [typed(item) for item in value]
    if isinstance(value, tuple):
        return {"t": [typed(item) for item in value]}
    if isinstance(value, dict):
        return {"m": [[typed(key), typed(item)] for key, item in value.items()]}
    raise TypeError(type(value))


def emit(payload, namespace="jobs"):
    """Writes the vector of a payload, whatever fencekit makes of it."""
    vector = {"namespace": namespace, "payload": typed(payload)}
    try:
        vector["key"] = idempotency_key(payload, namespace=namespace)
        vector["canonical"] = canonicalize(payload)
    except CanonicalizeError as refusal:
        vector["error"] = True
        vector["why"] = str(refusal)
    print(json.dumps(vector))


def bits(pattern):
    """Returns the double of a bit pattern."""
    return struct.unpack(">d", struct.pack(">Q", pattern))[0]


def chunks(items, size):
    for start in range(0, len(items), size):
        yield items[start : start + size]


# Characters at the edges of what is escaped, of the lengths of UTF-8 and UTF-16, and of sorting by either.
EDGES = [
    *map(chr, range(0x30)),
    *"09:@AZ[\\]_`az{|}~\x7f\x80\x85\xa0\xad\xdf\xe9\xff",
    *"\u0100\u0131\u0301\u07ff\u0800\u180e\u200b\u200d\u2028\u2029\u3042\u4e2d\ud7ff\ue000\ufeff\ufffd\uffff",
    *"\U00010000\U0001f600\U0001f9d1\U000e0001\U0010fffd\U0010ffff",
]


def random_character(rng):
    if rng.random() < 0.5:
        return chr(rng.randrange(0x20, 0x7F))
    if rng.random() < 0.5:
        return rng.choice(EDGES)
    code = rng.randrange(0x110000 - 0x800)
    return chr(code if code < 0xD800 else code + 0x800)


def random_text(rng, longest=8):
    return "".join(random_character(rng) for _ in range(rng.randint(0, longest)))


def random_integer(rng):
    size = rng.choice([1, 4, 8, 16, 31, 32, 53, 54, 63, 64, 65, 96, 127])
    number = rng.getrandbits(size) * rng.choice([1, -1])
    if rng.random() < 0.2:
        number = 2**size + rng.randint(-1, 1)
    return max(LEAST, min(GREATEST, number))


def random_float(rng):
    kind = rng.randrange(5)
    if kind == 0:
        number = bits(rng.getrandbits(64))
        return number if math.isfinite(number) else 0.0
    if kind == 1:
        return float(rng.randint(-(10**6), 10**6))
    if kind == 2:
        return round(rng.uniform(-1000, 1000), rng.randint(0, 6))
    if kind == 3:
        return rng.choice([1, -1]) * rng.randint(1, 10**17 - 1) * 10.0 ** rng.randint(-30, 10)
    return float(rng.getrandbits(rng.randint(1, 90)))


def random_scalar(rng):
    return rng.choice([random_text, random_integer, random_float, lambda r: r.choice([None, True, False])])(rng)


def random_value(rng, depth):
    kind = rng.random()
    if depth == 0 or kind < 0.55:
        return random_scalar(rng)
    if kind < 0.72:
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    if kind < 0.80:
        return tuple(random_value(rng, depth - 1) for _ in range(rng.randint(0, 3)))
    return random_dict(rng, depth - 1)


def random_dict(rng, depth):
    return {random_text(rng): random_value(rng, depth) for _ in range(rng.randint(0, 5))}


def random_namespace(rng):
    text = "".join(each for each in random_text(rng, 12) if each != ":" and not each.isspace())
    return text or "n"


def shuffled(rng, value):
    """Returns the value with the entries of each dict in another order."""
    if isinstance(value, dict):
        items = [(key, shuffled(rng, item)) for key, item in value.items()]
        rng.shuffle(items)
        return dict(items)
    if isinstance(value, (list, tuple)):
        return type(value)(shuffled(rng, item) for item in value)
    return value


def spoiled(rng, value):
    """Returns the value with one thing put somewhere into it that fencekit refuses."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return {**value, key: spoiled(rng, value[key])}
    if isinstance(value, (list, tuple)) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return type(value)(spoiled(rng, item) if at == index else item for at, item in enumerate(value))
    bad = [math.nan, math.inf, -math.inf, b"", b"bytes", {1: "int"}, {True: "bool"}, {None: "none"}, {0.5: "float"}]
    bad += [{("tuple",): 1}, {b"bytes": 1}, {"good": 1, -(2**70): 2}]
    return rng.choice(bad)


def main():
    rng = random.Random(SEED)
    header = {
        "generator": "generate_idempotency_keys.py",
        "fencekit": importlib.metadata.version("fencekit"),
        "python": platform.python_version(),
        "seed": SEED,
    }
    print(json.dumps(header))

    # The smallest, and each scalar by itself.
    emit({})
    for value in [None, True, False, 0, 1, -1, 0.0, -0.0, 1.0, -1.0, "", "1", [], {}, (), [[]], [{}], {"": {}}, [None]]:
        emit({"a": value})
    for value in [["a", "b"], ["b", "a"], ("a", "b"), [1, 1.0, True, "1"], {"b": 1, "a": 2}, {"a": 2, "b": 1}]:
        emit({"a": value})

    # Integers around every power of two, as wide as Rust has them.
    for size in range(129):
        around = [sign * 2**size + step for sign in (1, -1) for step in (-1, 0, 1)]
        emit({"int": [number for number in around if LEAST <= number <= GREATEST]})

    # Floats: every power of two and of ten with its neighbours, where Python changes from plain to exponent, halves of
    # what digits can tell apart, integers about 2^53, subnormals.
    twos = [2.0**exponent for exponent in range(-1074, 1024)]
    tens = [float(f"1e{exponent}") for exponent in range(-323, 309)]
    near = [math.nextafter(power, toward) for power in twos[::16] + tens[::2] for toward in (0.0, math.inf)]
    decimals = [float(f"{digits}e{exponent}") for digits in ("9.5", "1.25", "123456789") for exponent in range(-40, 40)]
    whole = [float(2**53 + step) for step in range(-8, 9)] + [float(10**16 + step) for step in range(-20, 21)]
    switch = [1e-4, 9.999e-5, 1e-5, 1e15, 9999999999999998.0, 1e16, 12345678901234567.0, 123456789012345678.0, 5e-324, sys.float_info.max]
    floats = twos + tens + near + decimals + whole + switch
    for chunk in chunks([number for number in floats if math.isfinite(number)], 32):
        emit({"float": [-number if index % 4 == 3 else number for index, number in enumerate(chunk)]})

    # Strings, and the same strings as keys, where the order shows.
    for character in EDGES:
        emit({"text": character, character: "text"})
    for _ in range(120):
        texts = [random_text(rng) for _ in range(6)]
        emit({"texts": texts, "keys": dict.fromkeys(texts)})
    for _ in range(40):
        keys = ["".join(rng.choices(["\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff", "a", "\x00"], k=2)) for _ in range(8)]
        emit(dict.fromkeys(keys, 0))

    # Namespaces: whatever is neither a colon nor whitespace.
    for namespace in ["a", "A", "é", "\U0001f600", "{a}", "a.b/c-d", "\x00", "\x7f", "\u180e", "\u200b", "\u2060", "\ufeff", "a" * 200]:
        emit({"n": 1}, namespace)
    for space in filter(str.isspace, map(chr, range(sys.maxunicode + 1))):
        emit({}, space)
        emit({}, f"a{space}b")
    for namespace in ["", ":", "a:", ":a", "a:b"]:
        emit({}, namespace)

    # Payloads that are no mapping.
    for payload in [None, True, 0, 1.5, math.nan, "", "text", [], [{}], ({"a": 1},), b"bytes"]:
        emit(payload)

    # Anything at all, in two orders, and with something in it that is refused.
    for _ in range(380):
        payload, namespace = random_dict(rng, 4), random_namespace(rng)
        emit(payload, namespace)
        if rng.random() < 0.4:
            emit(shuffled(rng, payload), namespace)
        if rng.random() < 0.4:
            emit({"payload": spoiled(rng, payload)}, namespace)

    # Deep, but not so deep that a parser refuses the typed form: each dict takes three of its 128 levels.
    for levels in (2, 16, 56):
        deep = rng.randint(0, 9)
        for level in range(levels):
            deep = [deep] if level % 2 else {"d": deep}
        emit({"deep": deep})


if __name__ == "__main__":
    main()
