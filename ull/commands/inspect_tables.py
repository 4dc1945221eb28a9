"""How `ull inspect` prints what it has found: tables of a bundle, of a daemon's engine, of measured costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from ull.bundle import DflashHead, EagleHead, Forward, Manifest, Model, Plans, Quality, device_parts

MIB = 1 << 20


def print_served(url: str, engine: Mapping[str, Any], executor: Mapping[str, Any]) -> None:
    """Prints what the daemon at `url` says of its engine and executor, as tables."""
    precision = engine["precision"]
    table = Table(title=f"{engine['name']}  ({url})", title_justify="left", show_header=False)
    table.add_row("model", f"{engine['architecture']}, {engine['layers']} layers x hidden {engine['hidden']}")
    table.add_row("vocabulary", f"{engine['vocabulary']} rows")
    table.add_row("precision", f"weights {precision['weights']}, lm_head {precision['lm_head']}")
    if engine["target"] != "cpu":
        table.add_row("forward", f"prefill {engine['forward']['prefill']}, decode {engine['forward']['decode']}")
    drafting = "where it pays" if executor.get("adaptive", True) else "in every round (speculation.adaptive is false)"
    table.add_row("drafting", drafting)
    table.add_row("built", f"{engine['created']} by ull {engine['ull_version']}")
    console = Console(highlight=False)
    console.print(table)
    digests = {"digest": engine.get("digest"), "source": engine.get("source_sha256")}
    console.print(_identity({**digests, **engine.get("drafter_sha256", {})}))
    print_costs({**executor, "executor": executor["name"]})


def parameter_count(model: Model) -> int:
    """Weights of the model's matrices and norms, without biases and padding."""
    attention, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    layer = model.hidden * (2 * attention + 2 * key + 3 * model.intermediate + 2)
    layer += 2 * model.head_dim if model.qk_norm else 0
    embeddings = (1 if model.tied_embeddings else 2) * model.vocabulary * model.hidden
    return model.layers * layer + embeddings + model.hidden


def print_tables(report: dict[str, Any]) -> None:
    names = ("path", "digest", "parameters", "weight_bytes", "memory_bytes")
    manifest = msgspec.convert(
        {key: value for key, value in report.items() if key not in (*names, "verified", "measured")}, Manifest
    )
    console = Console(highlight=False)
    table = Table(title=f"{manifest.name}  ({report['path']})", title_justify="left", show_header=False)
    for name, value in _rows(manifest, report["parameters"]):
        table.add_row(name, value)
    console.print(table)
    digests = {"digest": report["digest"], "source": manifest.provenance.source_sha256}
    if manifest.provenance.lora is not None:
        digests["LoRA adapter"] = manifest.provenance.lora.sha256
    for kind, source in manifest.provenance.drafters.items():
        digests[kind] = source.sha256
    console.print(_identity(digests))
    files = Table("file", "size", "SHA-256", title="files", title_justify="left")
    for name, entry in manifest.files.items():
        files.add_row(name, decimal(entry.bytes), entry.sha256[:16])
    console.print(files)
    weights = Table("weights", "size", title="weights by group", title_justify="left")
    for group, size in report["weight_bytes"].items():
        weights.add_row(group, decimal(size), end_section=group == list(report["weight_bytes"])[-2])
    console.print(weights)
    memory = Table("memory of a daemon", "size", title="at most", title_justify="left")
    for part, size in report["memory_bytes"].items():
        if part != "total":
            memory.add_row(part, decimal(size), end_section=part == "messages")
    memory.add_row("MemoryMax", f"{report['memory_bytes']['total'] // MIB}M")
    console.print(memory)


def _rows(manifest: Manifest, parameters: int) -> list[tuple[str, str]]:
    """Name and value of each line of the main table."""
    model, precision, tokens = manifest.model, manifest.precision, manifest.tokens
    rope = f"theta {model.rope.theta:g}, {model.rope.kind}"
    rope += "" if model.rope.factor is None else f" x{model.rope.factor:g}"
    windowed = [window for window in model.windows if window]
    window = f"{len(windowed)} of {model.layers} layers, {max(windowed)} tokens" if windowed else "none"
    rows = [
        ("format", f"{manifest.format} {manifest.format_version}, target {manifest.target}"),
        ("model", f"{model.architecture}, {parameters / 1e6:,.1f} M parameters"),
        ("layers", f"{model.layers} x hidden {model.hidden}, intermediate {model.intermediate}"),
        ("attention", f"{model.heads} heads, {model.kv_heads} KV heads, head size {model.head_dim}"),
        ("rotary embedding", rope),
        ("sliding window", window),
        ("vocabulary", f"{model.tokenizer_vocabulary} tokens, {model.vocabulary} rows"),
        ("embeddings", "tied" if model.tied_embeddings else "untied"),
        ("context", f"{model.context} tokens"),
        ("precision", f"weights {precision.weights}, lm_head {precision.lm_head}, embedding {precision.embedding}"),
        ("KV cache", precision.kv),
        ("tokens", f"BOS {tokens.bos}, EOS {tokens.eos}, chat template {'yes' if tokens.chat_template else 'no'}"),
    ]
    rows += _speculation_rows(manifest) + _device_rows(manifest)
    if manifest.quality is None:
        rows.append(("quality", "not measured"))
    else:
        quality = manifest.quality
        inexact = [item for item in quality.tensors if item.relative_error > 0]
        worst = max(inexact, key=lambda item: item.relative_error, default=None)
        rows += [
            ("perplexity", f"{quality.perplexity_original:.4f} original, {quality.perplexity_quantised:.4f} built"),
            ("increase", f"{quality.perplexity_increase:+.3%} (limit {quality.limit:.2%})"),
            ("top-1 agreement", f"{quality.top1_agreement:.2%} of {quality.eval_tokens} tokens"),
            *_fast_prefill_rows(quality),
            *_drafting_rows(quality),
            ("measured on", f"{quality.eval_text}, windows of {quality.window} tokens"),
            (
                "largest error",
                f"{worst.relative_error:.3%} ({worst.name})" if worst and worst.relative_error else "none",
            ),
        ]
    rows += _calibration_rows(manifest) + _activation_rows(manifest) + _source_rows(manifest)
    rows.append(("built", f"{manifest.created} by ull {manifest.provenance.builder_version}"))
    return rows


def _source_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """What the weights were read from, and what drafts."""
    provenance = manifest.provenance
    rows = [("source", provenance.hub.get("model", provenance.source))]
    if provenance.source_files:
        rows.append(("source's files", " ".join(provenance.source_files)))
    if provenance.fp8_source is not None:
        rows.append(("source's weights", provenance.fp8_source.describe(manifest.precision.weights)))
    rows += [(f"{kind} from", found) for kind, found in provenance.hub.items() if kind != "model"]
    if provenance.lora is not None:
        rows.append(("LoRA adapter's files", " ".join(provenance.lora.files)))
    return rows + [(f"{kind}'s files", " ".join(source.files)) for kind, source in provenance.drafters.items()]


def _identity(digests: Mapping[str, str | None]) -> Table:
    """The bundle's digest and the hashes of what it was built from; None: it has no source."""
    table = Table("of", "SHA-256", title="identity", title_justify="left")
    for name, digest in digests.items():
        if digest is not None:
            table.add_row(name, digest)
    return table


def _fast_prefill_rows(quality: Quality) -> list[tuple[str, str]]:
    """What prompts that are read with FP8 activations cost."""
    if (fast := quality.fast_prefill) is None:
        return []
    change = f"{fast.perplexity_increase:+.3%}, top-1 agreement {fast.top1_agreement:.2%}"
    return [("with fast prefill", f"perplexity {fast.perplexity:.4f} ({change})")]


def _calibration_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """FP8 activations: what they cost on top, and how their ranges were chosen."""
    calibration = manifest.calibration
    if calibration is None:
        return []
    change = f"{calibration.perplexity_increase:+.3%}, top-1 agreement {calibration.top1_agreement:.2%}"
    tried = ", ".join(f"{method} {loss:.4f}" for method, loss in calibration.losses.items())
    chosen = calibration.method if calibration.percentile is None else f"{calibration.percentile:g}th percentile"
    return [
        ("with FP8 activations", f"perplexity {calibration.perplexity:.4f} ({change})"),
        ("activation ranges", f"{chosen} of |x|, {calibration.tokens} tokens of {calibration.text}"),
        ("ranges tried", f"perplexity there: {tried}"),
    ]


def _activation_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Whether f16 holds the activations of a GPU's bundle."""
    found = manifest.activations
    if found is None:
        return [] if manifest.target == "cpu" else [("activations", "not checked whether f16 holds them")]
    share = f"at most {found.largest_share:.2%} of what f16 holds ({found.largest_at})"
    rows = [("activations", f"{share}, {found.tokens} tokens of {found.text}")]
    if found.scaled:
        scaled = ", ".join(f"{name} by 2^-{exponent}" for name, exponent in found.scaled.items())
        rows.append(("scaled to fit", scaled))
    return rows


def _drafting_rows(quality: Quality) -> list[tuple[str, str]]:
    """What the drafters gave when the bundle was built."""
    rates = ", ".join(f"{name} {rate:.2f}" for name, rate in quality.tokens_per_round.items())
    return [("tokens per round", f"{rates}, of 1.00 without drafting")] if rates else []


def _speculation_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """What drafts for the engine."""
    speculation = manifest.speculation
    if speculation is None:
        return [("speculation", "none (built before there was any)")]
    rows = [("speculation", f"default {speculation.default}, at most {speculation.max_tree} tokens per verification")]
    if (medusa := speculation.medusa) is not None:
        head = "the model's lm_head" if medusa.version == "2" else "lm_heads of their own"
        layers = "1 layer" if medusa.layers == 1 else f"{medusa.layers} layers"
        rows.append(("medusa heads", f"{medusa.heads} of {layers}, {head} (version {medusa.version})"))
    if (draft := speculation.draft) is not None:
        model = draft.model
        size = f"{parameter_count(model) / 1e6:,.1f} M parameters, {model.layers} x hidden {model.hidden}"
        rows.append(("draft model", f"{model.architecture}, {size}, weights {draft.precision.weights}"))
    if (eagle := speculation.eagle) is not None:
        rows.append(("eagle head", f"{_head_text(eagle)}, EAGLE-{_eagle_version(eagle)}"))
    if (dflash := speculation.dflash) is not None:
        kind = f"DSpark, Markov rank {dflash.markov}" if dflash.markov else "DFlash"
        kind += ", confidence" if dflash.confidence else ""
        rows.append(("dflash head", f"{_head_text(dflash)}, blocks of {dflash.block}, {kind}"))
    return rows


def _head_text(head: EagleHead | DflashHead) -> str:
    model = head.model
    layers = "1 layer" if model.layers == 1 else f"{model.layers} layers"
    own = f"{model.vocabulary} tokens of its own" if head.mapped else "the model's tokens"
    return f"{layers} x hidden {model.hidden}, reads layers {', '.join(map(str, head.taps))}, {own}"


def _eagle_version(head: EagleHead) -> str:
    return "3.1" if head.norm_output or head.tap_norm == "each" else "3"


def _device_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """The kernels of a bundle for a GPU, those of what drafts too."""
    if manifest.code is None:
        return []
    code, codes = manifest.code, [part.code for part in device_parts(manifest)]
    kernels, cubins = sum(len(one.kernels()) for one in codes), sum(len(one.files) for one in codes)
    copy = [("lm_head scan", "an FP8 copy, read for tokens of which no other logit is asked for")]
    rows = copy if manifest.precision.lm_head_scan else []
    rows += [("kernels", f"{kernels} in {cubins} cubins, {code.compiler} {code.toolkit}")]
    if manifest.random_weights:
        rows.append(("weights", "random, made up on the device at load: a benchmark bundle"))
    rows.append(("forward", f"prefill {manifest.forward.prefill}, decode {manifest.forward.decode}"))
    if manifest.forward.tree_products == "warpgroup":
        rows.append(("trees of 16 and more", "multiplied by warpgroups"))
    if device_parts(manifest)[0].reads_chunks:
        rows.append(("prompts", "read in chunks of up to 512 tokens"))
    if manifest.forward.prefill == "fast":
        rows.append(("KV kept", f"{_KEPT[manifest.forward.reuse]}, for the next turn"))
    if (plans := manifest.forward.plans) is not None:
        rows += _plan_rows(plans, manifest.forward)
    return rows + [("note" if number == 0 else "", note) for number, note in enumerate(manifest.forward.notes)]


_KEPT = {"all": "all", "prompt": "the prompt's", "nothing": "none"}  # by Forward.reuse


def _plan_rows(plans: Plans, forward: Forward) -> list[tuple[str, str]]:
    """The TensorRT plans, and what of speculation and caching they leave."""
    rows = [
        ("plans", f"{len(plans.files)} by TensorRT {plans.version} on {plans.gpu}, {plans.attention} attention"),
        ("rounds", f"of up to {', '.join(map(str, forward.tree_sizes))} tokens: bit-identical to plain decoding"),
        ("KV kept", f"{_KEPT[forward.reuse]}, for the next turn"),
    ]
    if plans.profiles:
        rows.append(("kernels chosen", "; ".join(map(_profile_text, plans.profiles))))
    if plans.sixteen_bits:
        rows.append(("16-bit activations", f"{', '.join(plans.sixteen_bits)}: their FP8 kernels proved wrong"))
    rows += _operand_rows(plans)
    if (check := plans.check) is not None:
        limit = f"(limit {check.limit:.0%}), {check.tokens} tokens"
        if check.cpu_error is not None:
            against = f"{check.cpu_error:.2%} off the cpu executor with the same activations"
            rows.append(("plans' logits", f"{against} {limit}"))
        if check.fused_error is not None:
            kernels = f"{check.fused_error:.2%}"
            kernels += f" {limit}" if check.activation_error is None else ""
            alone = (
                "" if check.activation_error is None else f"; FP8 activations alone cost {check.activation_error:.2%}"
            )
            rows.append(("off our kernels'", kernels + alone))
    return rows


def _profile_text(profile: tuple[int, int, int]) -> str:
    least, best, most = profile
    return f"for {best}" if least == most else f"for {best}, used for {least} to {most} tokens"


def _operand_rows(plans: Plans) -> list[tuple[str, str]]:
    """Linears that TensorRT does not multiply as they were described, by what it multiplies instead."""
    if not plans.operands:
        return [("operands", "as described in every linear, as TensorRT's inspector says")]
    rows = []
    for found in sorted(set(plans.operands.values())):
        names = [name for name, kind in plans.operands.items() if kind == found]
        rows.append(("NOT as described", f"{found}: {', '.join(names)}"))
    return rows


def print_costs(measured: Mapping[str, Any]) -> None:
    """What the executor measured: time per pass, by the tokens verified in it, and per proposal of one token."""
    console = Console(highlight=False)
    threads = "1 thread" if measured["threads"] == 1 else f"{measured['threads']} threads"
    memory = Table("memory", "size", title=f"{measured['executor']}, {threads}", title_justify="left")
    for what, name in (("weight_bytes", "weights"), ("kv_bytes", "KV cache")):
        memory.add_row(name, f"{decimal(measured[what])}, of it drafters {decimal(measured[f'drafter_{what}'])}")
    console.print(memory)
    costs: dict[str, int] = measured["verify_ns"]
    if not costs:
        return
    plain = next(iter(costs.values()))
    table = Table("tokens verified at once", "time", "of one token's", title="measured costs", title_justify="left")
    for count, cost in costs.items():
        table.add_row(count, f"{cost / 1000:,.0f} us", f"{cost / plain:.2f}x", end_section=count == list(costs)[-1])
    for drafter, cost in measured["draft_ns"].items():
        table.add_row(f"drafting one, {drafter}", f"{cost / 1000:,.1f} us", f"{cost / plain:.2f}x")
    console.print(table)


def print_verification(hashes: dict[str, str | None]) -> None:
    table = Table("file", "SHA-256", title="verification", title_justify="left")
    for name, problem in hashes.items():
        table.add_row(name, "[green]ok[/]" if problem is None else f"[red]{problem}[/]")
    Console(highlight=False).print(table)
