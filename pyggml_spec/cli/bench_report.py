"""The results of `bench` as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .draft_trees import printable_text
from .render import align, format_bytes


def render_bench(report: dict[str, Any]) -> str:
    """Speeds, acceptance, where the time goes, verify by width, memory."""
    sections = {
        "speed (decoding only)": align(_speed_rows(report["contenders"])),
        "milliseconds a round": align(_round_rows(report["contenders"])),
        "rounds that accepted a token at depth": align(_curve_rows(report["contenders"])),
        f"milliseconds a verify, behind {report['verify_context']} tokens": align(_width_rows(report["verify_ms"])),
        "memory": align(_memory_rows(report["memory"])),
    }
    body = "\n\n".join(f"{title}\n{text}" for title, text in sections.items() if text)
    return f"{render_head(report)}\n\n{body}"


def render_head(report: dict[str, Any]) -> str:
    """What was measured, on what, and how."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    threads = f", threads: {report['n_threads']}" if report["device_kind"] == "cpu" else ""
    rows = [
        ("model", f"{report['model']} with {report['drafter'] or 'no drafter'}"),
        ("device", f"{report['device']}{threads}, load {report['load']}" if report["load"] else report["device"]),
        ("versions", versions),
        ("method", report["method"]),
        *([("imposed", _imposed_text(report["imposed"]))] if report.get("imposed") else []),
        ("excluded", report["excluded"]),
    ]
    return align(rows)


def _imposed_text(rates: Sequence[float]) -> str:
    """What `--impose` makes of the run."""
    listed = ", ".join(f"{rate:g}" for rate in rates)
    siblings = "in trees each next candidate is assumed right half of the remaining times"
    return f"acceptance by depth {listed}; {siblings}: THE TEXT IS NOT REAL, only times are"


def _speed_rows(contenders: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, row in contenders.items():
        low, high = row["tok_s_range"]
        length = row["acceptance_length"]
        yield (
            f"  {name}",
            f"{row['tok_s']:.1f} tokens/s",
            f"({low:.1f} .. {high:.1f})",
            f"{row['ratio_to_off']:.2f} x" if row["ratio_to_off"] else "",
            f"{length:.2f} tokens a round" if length else "plain",
            _remark(row),
        )


def _remark(row: dict[str, Any]) -> str:
    if row["same_tokens_as_off"] is None:
        return ""
    text = "same text as off" if row["same_tokens_as_off"] else "OTHER TEXT than off: see --parity"
    plain = f"; {row['plain_rounds']} of {row['rounds']} rounds plain" if row["plain_rounds"] else ""
    return text + plain if row["engaged"] else f"{text}; {row['why']}"


def _round_rows(contenders: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    yield ("  ", "draft", "verify", "host", "all", "share of the host")
    for name, row in contenders.items():
        parts = [row[f"{part}_ms_per_round"] for part in ("draft", "verify", "host")]
        share = parts[2] / sum(parts) if sum(parts) else 0.0
        yield (f"  {name}", *(f"{ms:.3f}" for ms in (*parts, sum(parts))), f"{share:.1%}")


def _curve_rows(contenders: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    n_depths = max((len(row["offered_per_depth"]) for row in contenders.values()), default=0)
    if n_depths:
        yield ("  depth", *map(str, range(1, n_depths + 1)))
    for name, row in contenders.items():
        if row["engaged"]:
            n_rounds = row["rounds"] - row["plain_rounds"]
            yield (f"  {name}", *(f"{count / n_rounds:.0%}" for count in row["accepted_per_depth"]))


def _width_rows(widths: dict[str, dict[str, float]]) -> Iterator[tuple[str, ...]]:
    if widths:
        yield ("  nodes", *widths)
    for shape in next(iter(widths.values()), {}):
        yield (f"  {shape}", *(f"{times[shape]:.2f}" for times in widths.values()))


def _memory_rows(memory: dict[str, int]) -> Iterator[tuple[str, str]]:
    for name, n_bytes in memory.items():
        yield f"  {name.replace('_', ' ')}", format_bytes(n_bytes)


def render_parity(report: dict[str, Any]) -> str:
    """One line per prompt and way of decoding, the verdict last."""
    lines = align(_parity_rows(report["prompts"]))
    n_runs = len(report["prompts"])
    verdict = f"{report['n_equal']} of {n_runs} runs equal the plain one"
    if report["n_equal"] < n_runs:
        verdict += f", {report['n_near_ties']} part at a near-tie (below {report['near_tie']:g} nats)"
    if report["n_faults"]:
        verdict += f", {report['n_faults']} PART WHERE THE TARGET WAS SURE: that is a fault"
    return f"{render_head(report)}\n\n{lines}\n\n{verdict}"


def _parity_rows(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        prompt = printable_text(row["prompt"])
        yield (
            f"  {prompt if len(prompt) <= 36 else prompt[:35] + chr(0x2026)}",
            row["mode"],
            f"{row['n_tokens']} tokens equal",
            _parity_remark(row),
        )


def _parity_remark(row: dict[str, Any]) -> str:
    if row["first_divergence"] is None:
        gap = row["smallest_gap"]
        return "" if gap is None else f"closest decision {gap:.3f} nats"
    choices = " instead of ".join(repr(row[side]) for side in ("speculative_text", "plain_text"))
    gaps = " and ".join("no token" if row[g] is None else f"{row[g]:.3f}" for g in ("speculative_gap", "plain_gap"))
    kind = "near-tie" if row["is_near_tie"] else "NO NEAR-TIE"
    return f"parts at token {row['first_divergence']}: {choices}; gaps {gaps} nats: {kind}"
