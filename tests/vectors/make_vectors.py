#!/usr/bin/env python3
"""Print golden vectors of the hash scheme as README.md states it. Needs mmh3 and siphash24."""
import importlib.metadata
import json
import struct
import sys

import mmh3
import siphash24

SEED = 1


def murmur(data, seed=SEED):
    return mmh3.hash64(data, seed, x64arch=True, signed=False)[0]


def u64(value):
    return struct.pack("<Q", value)


def siphash(data, key):
    return int.from_bytes(siphash24.siphash24(data, key=key).digest(), "little")


def hash_under(secret):
    """The scheme's `hash`: murmur, or SipHash under a key from the secret."""
    if not secret:
        return murmur
    key = b"".join(u64(siphash(secret.encode(), u64(SEED) + u64(half))) for half in (0, 1))
    return lambda data: siphash(data, key)


# A rendering is a list of (bytes, is_text).

def part(tag, inner):
    return [(bytes([0xFE, tag]), False)] + inner + [(b"\xff", False)]


def text(value):
    return [(value.encode(), True)]


def value(v):
    if v is None:
        return [(bytes([0xFD, 0]) + u64(0), False)]
    if isinstance(v, bool):
        return [(bytes([0xFD, 1]) + u64(int(v)), False)]
    if isinstance(v, int):
        return [(bytes([0xFD, 2 if v >= 0 else 3]) + u64(v & (2**64 - 1)), False)]
    if isinstance(v, float):
        return [(bytes([0xFD, 4]) + struct.pack("<d", v), False)]
    if isinstance(v, str):
        return part(13, text(v))
    if isinstance(v, list):
        return part(10, [piece for item in v for piece in value(item)])
    return part(11, [piece for k, item in v.items() for piece in part(12, text(k)) + value(item)])


def media(data):
    raw = data.encode()
    if len(raw) <= 1024:
        sample = raw
    else:
        stride = (len(raw) - 512) // 17
        windows = [raw[256 + k * stride:][:32] for k in range(1, 17)]
        sample = raw[:256] + b"".join(windows) + raw[-256:]
    return [(b"\xf9", False), (sample, True), (b"\xff" + u64(len(raw)), False)]


def content(c):
    if c is None:
        return []
    if isinstance(c, str):
        return part(1, text(c))
    out = []
    for p in c:
        if p["type"] == "text":
            out += part(1, text(p["text"]))
        elif p["type"] == "image_url":
            out += media(p["image_url"]["url"])
        elif p["type"] == "tool_use":
            out += part(4, part(9, text(p["name"])) + part(5, value(p["input"])))
        elif p["type"] == "tool_result":
            out += part(6, content(p["content"]))
        elif p["type"] == "thinking":
            out += part(2, text(p["thinking"]))
        else:
            out += part(8, value(dict(sorted(p.items()))))
    return out


def message(role, parts):
    len_bytes = sum(len(piece) for piece, is_text in parts if is_text)
    return ([(b"\xfc" + role.encode() + b"\xfb", False)] + parts
            + [(b"\xfa" + struct.pack("<I", len_bytes), False)])


def chat_message(m):
    parts = content(m.get("content"))
    for call in m.get("tool_calls", []):
        function = call["function"]
        parts = parts + part(4, part(9, text(function["name"])) + part(5, text(function["arguments"])))
    if "name" in m:
        parts = parts + part(9, text(m["name"]))
    return message(m["role"], parts)


def chain(messages, max_prefix_bytes, hashed):
    """Points as (hash, end_bytes), and the length of all text."""
    data, flags, ends = bytearray(), bytearray(), []
    for m in messages:
        for piece, is_text in m:
            data += piece
            flags += bytes([int(is_text)]) * len(piece)
        ends.append(len(data))
    fixed, at = [], 0
    while len(fixed) < 512:
        at += 256 if at < 4096 else 1024 if at < 32768 else 4096
        if at > max_prefix_bytes:
            break
        fixed.append(at)
    stop = fixed[-1] if fixed else 0
    at_end = [e for e in ends if e not in set(fixed)][:256]
    cuts = sorted(c for c in fixed + at_end if c <= min(stop, len(data)))
    points, before, start = [], 0, 0
    for cut in cuts:
        before = hashed(u64(before) + bytes(data[start:cut]))
        points.append((before, sum(flags[:cut])))
        start = cut
    return points, sum(flags)


PROMPT_TEXT = {9, 17, 18, 19, 20}


def namespace(fields, hashed):
    """fields: tag -> rendering."""
    out, len_bytes = b"", 0
    for tag in sorted(fields):
        out += bytes([tag]) + u64(hashed(b"".join(piece for piece, _ in fields[tag])))
        if tag in PROMPT_TEXT:
            len_bytes += sum(len(piece) for piece, is_text in fields[tag] if is_text)
    return hashed(out), len_bytes


def case(name, api, body, messages, fields, max_prefix_bytes=512 * 1024, secret="", tenant=""):
    for tag, given in ((0, secret), (1, tenant)):
        if given:
            fields[tag] = text(given.encode().hex())
    hashed = hash_under(secret)
    points, chain_bytes = chain(messages, max_prefix_bytes, hashed)
    ns, ns_bytes = namespace(fields, hashed)
    keys = [(murmur(u64(ns) + u64(0)), ns_bytes)] if ns_bytes else []
    keys += [(murmur(u64(ns) + u64(h)), ns_bytes + end) for h, end in points]
    return {
        "name": name, "api": api, "max_prefix_bytes": max_prefix_bytes, "secret": secret, "tenant": tenant,
        "body": json.dumps(body, separators=(",", ":")), "namespace": "%016x" % ns, "prompt_bytes": ns_bytes + chain_bytes,
        "chain": [["%016x" % h, end] for h, end in points], "keys": [["%016x" % h, end] for h, end in keys],
    }


def chat(name, body, **more):
    fields = {3: text(body["model"])}
    if "cache_salt" in body:
        fields[5] = text(body["cache_salt"])
    if "chat_template_kwargs" in body:
        fields[8] = value(dict(sorted(body["chat_template_kwargs"].items())))
    if "reasoning_effort" in body:
        fields[10] = value(body["reasoning_effort"])
    if "tools" in body:
        fields[18] = value(body["tools"])
    return case(name, "openai_chat", body, [chat_message(m) for m in body["messages"]], fields, **more)


def pattern(len_bytes):
    return "".join(chr(97 + (i * 7 + i // 26) % 26) for i in range(len_bytes))


def main():
    raw = []
    for seed in (0, 1, 0xDEADBEEF):
        for n in list(range(41)) + [255, 256, 1000, 4096]:
            data = bytes((i * 131 + 7) % 251 for i in range(n))
            raw.append([n, seed, "%016x" % murmur(data, seed)])
    tools = [{"type": "function", "function": {"name": "find", "parameters": {
        "type": "object", "properties": {"n": {"type": "integer", "default": -5, "minimum": 0.5}}, "strict": True,
        "enum": [None, False]}}}]
    user = {"role": "user", "content": "When is the reading room open on Sundays?"}
    cases = [
        chat("short", {"model": "demo", "messages": [user]}),
        chat("unicode", {"model": "d\u00e9mo", "messages": [
            {"role": "system", "content": "Antworte kurz. \U0001f680\n\"ja\" \\ \u65e5\u672c\u8a9e"}, user]}),
        chat("empty text", {"model": "demo", "messages": [{"role": "user", "content": ""}, user]}),
        chat("tools, salt, arguments", {"model": "demo", "messages": [user], "tools": tools, "cache_salt": "s",
                                        "chat_template_kwargs": {"z": 1, "a": {"y": 2, "x": 3}},
                                        "reasoning_effort": "low"}),
        chat("tool calls", {"model": "demo", "messages": [
            user, {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{\"n\":1}"}}]},
            {"role": "tool", "tool_call_id": "c1", "name": "find", "content": "10-16"}]}),
        chat("pictures", {"model": "demo", "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64," + pattern(1002)}},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64," + pattern(5000)}},
            {"type": "text", "text": "Same?"}, {"type": "hologram", "b": [1], "a": "x"}]}]}),
        chat("fixed offsets of all spacings", {"model": "demo", "messages": [
            {"role": "user", "content": pattern(40000)}, user]}),
        chat("message that ends on a fixed offset", {"model": "demo", "messages": [
            {"role": "user", "content": pattern(256 - 14)}, user]}),
        chat("prefix bound", {"model": "demo", "messages": [
            {"role": "user", "content": pattern(3000)}, user]}, max_prefix_bytes=2000),
        chat("secret and tenant", {"model": "demo", "messages": [user]}, secret="k\u00e9y", tenant="t-1"),
        chat("secret over all spacings", {"model": "demo", "messages": [
            {"role": "user", "content": pattern(40000)}, user], "tools": tools, "cache_salt": "s"}, secret="x" * 256),
        chat("many messages", {"model": "demo", "messages": [
            {"role": "user", "content": "ping %d" % i} for i in range(400)]}),
    ]
    body = {"model": "demo", "system": "You are patient.", "tools": [{"name": "look"}], "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."},
                                          {"type": "tool_use", "id": "t", "name": "look", "input": {"at": [1, "b"]}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
            {"type": "text", "text": "a bed"}]}]}]}
    cases.append(case("anthropic", "anthropic_messages", body,
                      [message(m["role"], content(m["content"])) for m in body["messages"]],
                      {3: text("demo"), 18: value(body["tools"]), 20: content(body["system"])}))
    ids = [(i * 977 + 13) % 150000 for i in range(700)] + [2**32 - 1]
    cases.append(case("token ids", "openai_completions", {"model": "demo", "prompt": ids},
                      [message("prompt", part(3, [(struct.pack("<I", i), True) for i in ids]))],
                      {3: text("demo")}))
    cases.append(case("text prompt", "openai_completions", {"model": "demo", "prompt": pattern(600)},
                      [message("prompt", part(1, text(pattern(600))))], {3: text("demo")}))
    json.dump({"tool": ", ".join(
        package + " " + importlib.metadata.version(package) for package in ("mmh3", "siphash24")), "version": SEED, "murmur3_x64_128_low64": raw, "prompts": cases},
              sys.stdout, indent=None, separators=(",", ":"), ensure_ascii=True)
    print()


if __name__ == "__main__":
    main()
