"""Train the tiny Llama checkpoint of this folder from the running interpreter's standard library.

    python train.py               corpus, tokenizer, training, export, figures (under 45 minutes on 2 cores)
    python train.py --resume      go on from the last saved optimizer state
    python train.py --figures     only recompute heldout perplexity and samples of the exported files
    python train.py --corpus DIR  only write the training texts to DIR, as `ull-train --text DIR` reads them

Every output lands in this folder in the Hugging Face layout; see README.md for the data and its licence.
Needs torch, tokenizers, safetensors and numpy.
"""

import argparse
import ast
import json
import math
import random
import sysconfig
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import torch.nn.functional as functional
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

FOLDER = Path(__file__).resolve().parent
SEED = 20
BOS, END_OF_TEXT, END = SPECIAL_TOKENS = ("<|bos|>", "<|endoftext|>", "<|end|>")

# Whole modules, never shown to the tokenizer or to the model.
HELD_OUT = ("graphlib.py", "heapq.py", "queue.py", "sched.py", "shlex.py", "textwrap.py")
# Third-party code, tests, and generated tables.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
# A table, two files of next to no code, and enciphered text.
SKIPPED_FILES = {"html/entities.py", "tomllib/_types.py", "idlelib/help_about.py", "this.py"}
# A file that shares this part of its long lines, or of the held-out module's, counts as a near-copy.
NEAR_COPY_SHARE = 0.05
LONG_LINE = 30  # characters

# Newlines stay with the indentation after them; "_" is a letter; a word takes one space before it.
SPLIT_PATTERN = r"\n+[ \t]*| ?[\p{L}_]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|[^\S\n]+(?!\S)|\s+"

# The model is not chat-trained beyond "exercises" (see exercises()), so a conversation is rendered as comments.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '# assistant:\\n' + message['content'] + '<|end|>\\n' }}"
    "{% else %}{{ '# ' + message['role'] + ': ' + message['content'].replace('\\n', '\\n# ') + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '# assistant:\\n' }}{% endif %}"
)

# A newline is one token with its indentation, so a prompt inside a block must not end in one.
SAMPLE_PROMPTS = (
    'def count_words(text):\n    """Return',
    "import os\nimport sys\n\n\nclass FileReader:\n    def __init__(self, path):",
    "# user: Return the size of a file.\n# assistant:\n",
)


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, all in elements."""

    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    key_value_heads: int = 2
    head_width: int = 32
    intermediate: int = 640
    context: int = 1024
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5


@dataclass(frozen=True)
class Schedule:
    """Training length, 26 minutes measured on 2 cores with AMX; the rate is constant, then falls to zero."""

    steps: int = 2000
    warmup_steps: int = 60
    decay_steps: int = 700
    sequences: int = 4  # per step, each `Shape.context` tokens
    matrix_rate: float = 5e-3  # Muon, with the update scaled to AdamW's RMS
    vector_rate: float = 4e-3  # AdamW, embeddings and norms
    weight_decay: float = 0.1  # matrices only
    gradient_norm: float = 1.0
    export_every: int = 100  # steps


# Corpus


def long_lines(text: str) -> set[str]:
    """Return the distinct stripped lines of `text` that are long enough to tell files apart."""
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= LONG_LINE}


def is_near_copy(text: str, held_out: list[set[str]]) -> bool:
    """Say whether `text` repeats a telling share of the long lines of any held-out module."""
    lines = long_lines(text)
    return any(
        len(lines & other) >= 3 and len(lines & other) > NEAR_COPY_SHARE * min(len(lines), len(other))
        for other in held_out
    )


def collect_corpus() -> tuple[dict[str, str], dict[str, str]]:
    """Read the standard library; return (training, held-out) texts by relative path, in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        generated = name.startswith(("_sysconfigdata", "config-"))
        if generated or name in SKIPPED_FILES or SKIPPED_FOLDERS & set(path.relative_to(root).parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")
        if text.strip():
            texts[name] = text
    held_out = {name: texts.pop(name) for name in HELD_OUT}
    fingerprints = [long_lines(text) for text in held_out.values()]
    training = {name: text for name, text in texts.items() if not is_near_copy(text, fingerprints)}
    print(
        f"corpus: {len(training)} files, {sum(map(len, training.values()))} characters; "
        f"near-copies left out: {sorted(texts.keys() - training.keys())}"
    )
    return training, held_out


def exercises(text: str) -> list[str]:
    """Turn the documented functions of a module into "# user: docstring line / # assistant: source" documents."""
    documents = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno - node.lineno > 25:
            continue
        request = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").strip()
        source = "\n".join(text.split("\n")[node.lineno - 1 : node.end_lineno])
        if 15 < len(request) < 200 and len(node.body) > 1:
            documents.append(f"# user: {request}\n# assistant:\n{textwrap.dedent(source)}\n")
    return documents


# Tokenizer


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Train a lossless byte-level BPE tokenizer of `vocabulary` entries, specials (ids 0..2) included."""
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(SPECIAL_TOKENS),
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def tokenize_documents(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """Return all documents as one shuffled stream of token ids, int64 [tokens].

    A file ends with END_OF_TEXT and an exercise with END, so that both are learned as ends of sequence.
    """
    end_of_text, end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END)
    documents = [[*tokenizer.encode(text).ids, end_of_text] for text in texts]
    for text in texts:
        documents += [[*tokenizer.encode(exercise).ids, end] for exercise in exercises(text)]
    random.Random(SEED).shuffle(documents)
    return torch.from_numpy(numpy.concatenate([numpy.array(document) for document in documents]))


# Model


def rotary_tables(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each f32 [context, head_width], laid out for rotate-half RoPE."""
    exponents = torch.arange(0, shape.head_width, 2, dtype=torch.float32) / shape.head_width
    angles = torch.outer(torch.arange(shape.context, dtype=torch.float32), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Apply rotate-half RoPE to states [B, heads, T, head_width]."""
    first, second = states.chunk(2, dim=-1)
    return (states * cosine + torch.cat((-second, first), dim=-1) * sine).to(states.dtype)


class Attention(torch.nn.Module):
    """Causal grouped-query attention, [B, T, hidden] -> [B, T, hidden]."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        query_width, key_width = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
        self.q_proj = torch.nn.Linear(shape.hidden, query_width, bias=False)
        self.k_proj = torch.nn.Linear(shape.hidden, key_width, bias=False)
        self.v_proj = torch.nn.Linear(shape.hidden, key_width, bias=False)
        self.o_proj = torch.nn.Linear(query_width, shape.hidden, bias=False)

    def forward(self, states, cosine, sine):
        batch, length, _ = states.shape
        split = (batch, length, -1, self.shape.head_width)
        query = rotate(self.q_proj(states).view(split).transpose(1, 2), cosine, sine)
        key = rotate(self.k_proj(states).view(split).transpose(1, 2), cosine, sine)
        value = self.v_proj(states).view(split).transpose(1, 2)
        groups = self.shape.heads // self.shape.key_value_heads
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(torch.nn.Module):
    """SwiGLU, [B, T, hidden] -> [B, T, hidden]."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = torch.nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = torch.nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = torch.nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, states):
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class Layer(torch.nn.Module):
    """One pre-norm decoder layer, [B, T, hidden] -> [B, T, hidden]."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = torch.nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = torch.nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.mlp = FeedForward(shape)

    def forward(self, states, cosine, sine):
        states = states + self.self_attn(self.input_layernorm(states), cosine, sine)
        return states + self.mlp(self.post_attention_layernorm(states))


class Llama(torch.nn.Module):
    """Llama with tied embeddings; parameter names are Hugging Face's without the "model." prefix."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = torch.nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = torch.nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        cosine, sine = rotary_tables(shape)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                deviation = 0.02 / math.sqrt(2 * shape.layers) if into_residual else 0.02
                torch.nn.init.normal_(parameter, std=deviation)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token ids [B, T] to logits [B, T, vocabulary]."""
        states = self.embed_tokens(tokens)
        cosine, sine = self.cosine[: tokens.shape[1]], self.sine[: tokens.shape[1]]
        for layer in self.layers:
            states = layer(states, cosine, sine)
        return functional.linear(self.norm(states), self.embed_tokens.weight)


# Training


def batches(stream: torch.Tensor, schedule: Schedule, context: int):
    """Yield `schedule.steps` pairs (inputs, targets), each [sequences, context], reshuffled and shifted every epoch."""
    generator = torch.Generator().manual_seed(SEED)
    starts = torch.empty(0, dtype=torch.int64)
    for _ in range(schedule.steps):
        if len(starts) < schedule.sequences:
            shift = int(torch.randint(context, (1,), generator=generator))
            starts = torch.arange(shift, len(stream) - context - 1, context)
            starts = starts[torch.randperm(len(starts), generator=generator)]
        chosen, starts = starts[: schedule.sequences], starts[schedule.sequences :]
        rows = torch.stack([stream[start : start + context + 1] for start in chosen.tolist()])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def rate_factor(step: int, schedule: Schedule) -> float:
    """Linear warm-up, constant, linear decay to zero; a factor of every learning rate."""
    return min((step + 1) / schedule.warmup_steps, 1.0, (schedule.steps - step) / schedule.decay_steps)


def make_optimizers(model: Llama, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [parameter for parameter in model.layers.parameters() if parameter.dim() == 2]
    inside = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    return [
        torch.optim.Muon(
            matrices, lr=schedule.matrix_rate, weight_decay=schedule.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=schedule.vector_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train(model: Llama, stream: torch.Tensor, shape: Shape, schedule: Schedule, checkpoint: Path, resume: bool) -> None:
    """Train in bf16 autocast over f32 weights, exporting and saving the optimizer states every `export_every` steps."""
    optimizers = make_optimizers(model, schedule)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    first = 0
    if resume and checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        first = state["step"]

    def loss_of(inputs, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(inputs)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    compiled_loss = torch.compile(loss_of)
    started, running = time.monotonic(), None
    for step, (inputs, targets) in enumerate(batches(stream, schedule, shape.context)):
        if step < first:
            continue
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate_factor(step, schedule)
        loss = compiled_loss(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.gradient_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        running = loss.item() if running is None else 0.95 * running + 0.05 * loss.item()
        done = step + 1
        if done % 20 == 0:
            rate = (done - first) * inputs.numel() / (time.monotonic() - started)
            print(f"step {done}/{schedule.steps} loss {running:.3f} {rate:.0f} tokens/s", flush=True)
        if done % schedule.export_every == 0:
            states = [optimizer.state_dict() for optimizer in optimizers]
            state = {"model": model.state_dict(), "optimizers": states, "step": done}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
            export_weights(model)


# Export


def write_atomically(name: str, text: str) -> None:
    """Write FOLDER/name so that a reader sees the old file or the new one, never a part."""
    draft = FOLDER / (name + ".new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(FOLDER / name)


def export_weights(model: Llama) -> None:
    """Write model.safetensors, bf16; the tied output matrix is not stored twice."""
    tensors = {"model." + name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    draft = FOLDER / "model.safetensors.new"
    save_file(tensors, draft, metadata={"format": "pt"})
    draft.chmod(0o644)
    draft.replace(FOLDER / "model.safetensors")


def export_description(tokenizer: Tokenizer, shape: Shape) -> None:
    """Write the tokenizer and every JSON file of the Hugging Face layout."""
    bos, end_of_text, end = (tokenizer.token_to_id(token) for token in SPECIAL_TOKENS)
    ends = [end_of_text, end]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "eos_token_id": ends,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "mlp_bias": False,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.key_value_heads,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }
    tokenizer_config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": shape.context,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation_config = {"bos_token_id": bos, "eos_token_id": ends, "do_sample": True, "temperature": 0.8}
    write_atomically("tokenizer.json", tokenizer.to_str(pretty=True) + "\n")
    write_atomically("config.json", json.dumps(config, indent=2) + "\n")
    write_atomically("tokenizer_config.json", json.dumps(tokenizer_config, indent=2) + "\n")
    write_atomically("generation_config.json", json.dumps(generation_config, indent=2) + "\n")


# Figures


def load_exported(shape: Shape) -> tuple[Llama, Tokenizer]:
    """Load the exported files; the bf16 weights are widened to f32."""
    tensors = load_file(FOLDER / "model.safetensors")
    model = Llama(shape)
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()})
    return model.eval(), Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@torch.inference_mode()
def heldout_loss(model: Llama, tokens: torch.Tensor, window: int, stride: int) -> float:
    """Return nats per token over tokens [T]; windows overlap by `window - stride` and score only new tokens."""
    total, scored = 0.0, 1
    for start in range(0, len(tokens), stride):
        stop = min(start + window, len(tokens))
        logits = model(tokens[None, start:stop])[0]
        losses = functional.cross_entropy(logits[:-1], tokens[start + 1 : stop], reduction="none")
        fresh = losses[scored - start - 1 :]
        total, scored = total + float(fresh.double().sum()), stop
        if stop == len(tokens):
            break
    return total / (len(tokens) - 1)


@torch.inference_mode()
def generate(model: Llama, tokenizer: Tokenizer, prompt: str, count: int, temperature: float, context: int) -> str:
    """Continue `prompt` by up to `count` tokens; temperature 0 is greedy."""
    generator = torch.Generator().manual_seed(1)
    tokens = tokenizer.encode(prompt).ids
    ends = {tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END)}
    for _ in range(count):
        logits = model(torch.tensor([tokens[-context:]]))[0, -1]
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            chosen = int(torch.multinomial(functional.softmax(logits / temperature, -1), 1, generator=generator))
        tokens.append(chosen)
        if chosen in ends:
            break
    return tokenizer.decode(tokens, skip_special_tokens=False)


def print_figures(shape: Shape) -> None:
    """Print what README.md quotes: parameters, held-out perplexity of the exported bf16 weights in f32, samples."""
    model, tokenizer = load_exported(shape)
    text = (FOLDER / "heldout.txt").read_text(encoding="utf-8")
    tokens = torch.tensor(tokenizer.encode(text).ids)
    loss = heldout_loss(model, tokens, shape.context, shape.context // 2)
    print(f"parameters: {sum(parameter.numel() for parameter in model.parameters())}")
    print(
        f"held-out: {len(text)} characters, {len(tokens)} tokens, {loss:.4f} nats/token, perplexity "
        f"{math.exp(loss):.3f}, {loss * (len(tokens) - 1) / math.log(2) / len(text.encode()):.4f} bits/byte"
    )
    for prompt in SAMPLE_PROMPTS:
        for temperature in (0.0, 0.8):
            sample = generate(model, tokenizer, prompt, 200, temperature, shape.context)
            print(f"--- temperature {temperature}\n{sample}")


def main() -> None:
    """Run the steps that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--figures", action="store_true")
    parser.add_argument("--corpus", type=Path, metavar="DIR")
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / "tiny_checkpoint.pt")
    arguments = parser.parse_args()
    shape, schedule = Shape(), Schedule()
    if arguments.corpus:
        for name, text in collect_corpus()[0].items():
            path = arguments.corpus / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return
    if not arguments.figures:
        started = time.monotonic()
        torch.manual_seed(SEED)
        training, held_out = collect_corpus()
        texts = list(training.values())
        tokenizer = train_tokenizer(texts, shape.vocabulary)
        write_atomically("heldout.txt", "".join(held_out.values()))
        python_licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
        write_atomically("LICENSE.python.txt", python_licence.read_text(encoding="utf-8"))
        export_description(tokenizer, shape)
        stream = tokenize_documents(tokenizer, texts)
        print(f"stream: {len(stream)} tokens, {schedule.steps * schedule.sequences * shape.context} trained on")
        model = Llama(shape)
        train(model, stream, shape, schedule, arguments.checkpoint, arguments.resume)
        export_weights(model)
        print(f"total time: {(time.monotonic() - started) / 60:.1f} minutes")
    print_figures(shape)


if __name__ == "__main__":
    main()
