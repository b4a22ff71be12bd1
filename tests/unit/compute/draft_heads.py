"""Heads that draft, as plain torch modules whose tensors have the published names: they say what
a head guesses of a whole text, without pages, chunks and steps.

The layers are those of transformers. Each head sees, at the place of a token, the model's state of
the one before.

Shape legend: B texts, T tokens, E hidden width.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

NUM_DRAFTS = 3


class Head(nn.Module):
    """What all have in common: states of a text, of which drafts are made one by one."""

    layers: tuple[int, ...]  # places in `states_of`
    std = 0.3  # of random weights, for logits of about the model's size

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.__dict__["model"] = model  # not one of its modules

    def kept(self, states: list[Tensor]) -> Tensor:
        return states[0]

    def own(self, embedded_BTE: Tensor, x_BTE: Tensor) -> Tensor:
        raise NotImplementedError

    def logits(self, own_BTE: Tensor) -> Tensor:
        raise NotImplementedError

    def drafts(
        self, text: list[int], count: int, bias_V: Tensor, *, sees_first: bool = False
    ) -> list[int]:
        """So many for what follows a text, whose last token the model has not seen; greedy.

        `sees_first`: it sees the first token, too, beside a state of zeros.
        """
        embed = self.model.get_input_embeddings()
        with torch.inference_mode():
            states = states_of(self.model, text[:-1])
            x_BTE = self.kept([states[layer] for layer in self.layers])
            if sees_first:
                x_BTE = torch.cat((torch.zeros_like(x_BTE[:, :1]), x_BTE), 1)
            guessed: list[int] = []
            for _ in range(count):
                seen = text if sees_first else text[1:]
                embedded_BTE = embed(torch.tensor([seen + guessed]))
                last_BE = self.own(embedded_BTE, x_BTE)[:, -1:]
                guessed.append(int((self.logits(last_BE) + bias_V).argmax()))
                x_BTE = torch.cat((x_BTE, last_BE), 1)
        return guessed

    def run(self, layer: nn.Module, x_BTE: Tensor) -> Tensor:
        """A causal layer of transformers over whole texts."""
        num_tokens = x_BTE.shape[1]
        positions = torch.arange(num_tokens)[None]
        mask = torch.full((num_tokens, num_tokens), -torch.inf, dtype=x_BTE.dtype).triu(1)
        out = layer(
            x_BTE,
            attention_mask=mask[None, None],
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(x_BTE, positions),
        )
        return out[0] if isinstance(out, tuple) else out

    def save(self, folder: Path, **config: Any) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: x.contiguous().clone() for name, x in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        fields = self.model.config.to_dict() | {"num_hidden_layers": 1} | config
        (folder / "config.json").write_text(json.dumps(fields, default=str))
        return folder


class Eagle3(Head):
    def layer(self, model: PreTrainedModel) -> nn.Module:
        return LlamaDecoderLayer(layer_config(model), 0)

    def __init__(self, model: PreTrainedModel, num_ids: int) -> None:
        super().__init__(model)
        config = layer_config(model)
        width = config.hidden_size
        self.layers = (2, model.config.num_hidden_layers // 2, model.config.num_hidden_layers - 3)
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.midlayer = self.layer(model)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self.midlayer.self_attn, name).out_features
            setattr(self.midlayer.self_attn, name, nn.Linear(2 * width, rows, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, num_ids, bias=False)
        ids = torch.arange(0, config.vocab_size, config.vocab_size / num_ids).long()
        self.register_buffer("d2t", ids - torch.arange(num_ids))
        self.register_buffer("t2d", torch.isin(torch.arange(config.vocab_size), ids))

    def kept(self, states: list[Tensor]) -> Tensor:
        return self.fc(torch.cat(states, -1))

    def own(self, embedded_BTE: Tensor, x_BTE: Tensor) -> Tensor:
        layer = self.midlayer
        both = torch.cat((layer.input_layernorm(embedded_BTE), layer.hidden_norm(x_BTE)), -1)
        x_BTE = x_BTE + self.run(layer.self_attn, both)
        return x_BTE + layer.mlp(layer.post_attention_layernorm(x_BTE))

    def logits(self, own_BTE: Tensor) -> Tensor:
        logits = self.lm_head(self.norm(own_BTE))
        out = logits.new_full((*logits.shape[:-1], self.model.config.vocab_size), -torch.inf)
        out[..., torch.arange(logits.shape[-1]) + self.d2t] = logits
        return out


class Eagle3Speculator(Eagle3):
    """As vLLM's speculators train it: with norms before the first map and of heads, and a stream
    that goes on from the normed state."""

    def layer(self, model: PreTrainedModel) -> nn.Module:
        return Qwen3DecoderLayer(qwen3_config(model), 0)

    def __init__(self, model: PreTrainedModel, num_ids: int) -> None:
        super().__init__(model, num_ids)
        self.input_norm = LlamaRMSNorm(3 * model.config.hidden_size, model.config.rms_norm_eps)

    def kept(self, states: list[Tensor]) -> Tensor:
        return self.fc(self.input_norm(torch.cat(states, -1)))

    def own(self, embedded_BTE: Tensor, x_BTE: Tensor) -> Tensor:
        layer = self.midlayer
        normed_BTE = layer.hidden_norm(x_BTE)
        both = torch.cat((layer.input_layernorm(embedded_BTE), normed_BTE), -1)
        x_BTE = normed_BTE + self.run(layer.self_attn, both)
        return x_BTE + layer.mlp(layer.post_attention_layernorm(x_BTE))

    def state_dict(self, *args: Any, **more: Any) -> dict[str, Tensor]:
        tensors = super().state_dict(*args, **more)
        return {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}


class Eagle(Head):
    layers = (-1,)
    std = 0.05

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        width = model.config.hidden_size
        self.fc = nn.Linear(2 * width, width)
        self.layers_ = nn.ModuleList([LlamaDecoderLayer(layer_config(model), 0)])
        self.layers_[0].input_layernorm = nn.Identity()

    def own(self, embedded_BTE: Tensor, x_BTE: Tensor) -> Tensor:
        return self.run(self.layers_[0], self.fc(torch.cat((embedded_BTE, x_BTE), -1)))

    def logits(self, own_BTE: Tensor) -> Tensor:
        return self.model.lm_head(own_BTE)

    def state_dict(self, *args: Any, **more: Any) -> dict[str, Tensor]:
        tensors = super().state_dict(*args, **more)
        named = {name.replace("layers_.", "layers."): x for name, x in tensors.items()}
        return named | {"embed_tokens.weight": self.model.get_input_embeddings().weight}


class Medusa(Head):
    layers = (-1,)

    def __init__(self, model: PreTrainedModel, num_heads: int) -> None:
        super().__init__(model)
        width, vocab_size = model.config.hidden_size, model.config.vocab_size
        for number in range(num_heads):
            block = nn.ModuleDict({"linear": nn.Linear(width, width)})
            head = nn.Linear(width, vocab_size, bias=False)
            self.add_module(str(number), nn.ModuleList([block, head]))

    def drafts(self, text: list[int], count: int, bias_V: Tensor) -> list[int]:
        with torch.inference_mode():
            out = self.model(torch.tensor([text[:-1]]), output_hidden_states=True)
            x_E = out.hidden_states[-1][0, -1]
            return [int((self.guess(x_E, number) + bias_V).argmax()) for number in range(count)]

    def guess(self, x_E: Tensor, number: int) -> Tensor:
        block, head = getattr(self, str(number))
        return head(x_E + F.silu(block["linear"](x_E)))


class NextToken(Head):
    """A layer behind the last one of a model."""

    layers = (-1,)

    def __init__(self, model: PreTrainedModel, number: int = 0) -> None:
        super().__init__(model)
        config = model.config
        width, number = config.hidden_size, config.num_hidden_layers + number
        kinds = {"deepseek_v3": DeepseekV3DecoderLayer, "glm4_moe": Glm4MoeDecoderLayer}
        self.layer = kinds[config.model_type](config, number)
        self.enorm, self.hnorm, self.last = (
            LlamaRMSNorm(width, config.rms_norm_eps) for _ in range(3)
        )
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, config.vocab_size, bias=False)

    def own(self, embedded_BTE: Tensor, x_BTE: Tensor) -> Tensor:
        both = torch.cat((self.enorm(embedded_BTE), self.hnorm(x_BTE)), -1)
        return self.last(self.run(self.layer, self.eh_proj(both)))

    def logits(self, own_BTE: Tensor) -> Tensor:
        return self.head(own_BTE)

    def published(self, at: str) -> dict[str, Tensor]:
        """Its tensors by the names of checkpoints, which begin so."""
        names = {"layer.": "", "last.": "shared_head.norm.", "head.": "shared_head.head."}
        tensors = {}
        for name, x in self.state_dict().items():
            for ours, theirs in names.items():
                if name.startswith(ours):
                    name = theirs + name.removeprefix(ours)
                    break
            tensors[at + name] = x
        embedding = self.model.get_input_embeddings()
        return tensors | {f"{at}embed_tokens.weight": embedding.weight}


class NextTokens(Head):
    """All such layers of a model whose folder they are saved in: the one of number k predicts the
    token k + 1 behind the next from the state of the one before it (DeepSeek V3, section 2.2)."""

    layers = (-1,)

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        super().__init__(model)
        self.further = [random_weights(NextToken(model, n), seed=3 + n) for n in range(num_layers)]

    def drafts(
        self, text: list[int], count: int, bias_V: Tensor, *, sees_first: bool = False
    ) -> list[int]:
        """Those behind the layers are of the last one's own states."""
        embed = self.model.get_input_embeddings()

        def behind_zeros(x_BTE: Tensor) -> Tensor:
            return torch.cat((torch.zeros_like(x_BTE[:, :1]), x_BTE), 1) if sees_first else x_BTE

        with torch.inference_mode():
            out = self.model(torch.tensor([text[:-1]]), output_hidden_states=True)
            x_BTE, own_BTE = out.hidden_states[-1], torch.empty(0)
            guessed: list[int] = []
            for number in range(count):
                layer = self.further[min(number, len(self.further) - 1)]
                if number < len(self.further):
                    x_BTE = behind_zeros(own_BTE if number else x_BTE)
                else:
                    x_BTE = torch.cat((x_BTE, own_BTE[:, -1:]), 1)
                tokens = torch.tensor([(text + guessed)[-x_BTE.shape[1] :]])
                own_BTE = layer.own(embed(tokens), x_BTE)
                guessed.append(int((layer.logits(own_BTE[:, -1:]) + bias_V).argmax()))
        return guessed

    def save_beside(self, folder: Path) -> None:
        """Write their tensors into the model's folder, which is whole then."""
        tensors = dict(self.model.state_dict())
        for number, layer in enumerate(self.further, self.model.config.num_hidden_layers):
            tensors |= layer.published(f"model.layers.{number}.")
        save_file(
            {n: x.contiguous().clone() for n, x in tensors.items()}, folder / "model.safetensors"
        )
        path = folder / "config.json"
        more = {"num_nextn_predict_layers": len(self.further)}
        path.write_text(json.dumps(json.loads(path.read_text()) | more))


def states_of(model: PreTrainedModel, text: list[int]) -> list[Tensor]:
    """What comes into each layer [B, T, E], what the last makes, and that behind the norm."""
    made: list[Any] = []
    layer = model.model.layers[-1]
    hook = layer.register_forward_hook(lambda _, given, out: made.append(out))
    out = model(torch.tensor([text]), output_hidden_states=True)
    hook.remove()
    (last,) = made
    last_BTE = last[0] if isinstance(last, tuple) else last
    return [*out.hidden_states[:-1], last_BTE, out.hidden_states[-1]]


H = TypeVar("H", bound=Head)


def random_weights(head: H, seed: int = 3) -> H:
    """Sharp enough that rounding does not decide a draft."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            is_norm = "norm" in name or name.startswith("last")
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * head.std + is_norm)
    return head.eval()


def layer_config(model: PreTrainedModel) -> LlamaConfig:
    """Of a layer like Llama's, of the model's sizes."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {name: getattr(model.config, name) for name in (*names, "vocab_size", "rms_norm_eps")}
    return LlamaConfig(**sizes, num_hidden_layers=1, attn_implementation="eager")


def qwen3_config(model: PreTrainedModel) -> Qwen3Config:
    config = layer_config(model)
    head_dim = config.hidden_size // config.num_attention_heads
    return Qwen3Config(**{**config.to_dict(), "model_type": "qwen3", "head_dim": head_dim})


def save_head(
    method: str, model: PreTrainedModel, folder: Path, head_folder: Path
) -> tuple[Head, str]:
    """A random head of this method (of `mtp 2` two layers; `eagle3 last` sees what the last one
    makes), saved for the model in a folder, and the setting that names it."""
    method, _, num_layers = method.partition(" ")
    fields: dict[str, Any] = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    if method == "mtp":
        within = NextTokens(model, int(num_layers or 1))
        within.save_beside(folder)
        return within, json.dumps(fields)
    head: Head
    if method == "eagle3":
        head, names = Eagle3(model, 120), {"architectures": ["LlamaForCausalLMEagle3"]}
        config: dict[str, Any] = {**names, "draft_vocab_size": 120}
        if num_layers == "last":
            head.layers = (1, 2, model.config.num_hidden_layers)
            config["eagle_aux_hidden_state_layer_ids"] = list(head.layers)
    elif method == "speculators":
        fields["method"] = "eagle3"
        names = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}
        layer = {"transformer_layer_config": qwen3_config(model).to_dict(), "norm_before_fc": True}
        head, config = Eagle3Speculator(model, 120), {**names, **layer, "draft_vocab_size": 120}
    elif method == "eagle":
        head, config = Eagle(model), {"architectures": ["LlamaForCausalLM"]}
    else:
        head, config = Medusa(model, 4), {"medusa_num_heads": 4, "medusa_num_layers": 1}
    random_weights(head).save(head_folder, **config)
    return head, json.dumps({**fields, "model": str(head_folder)})
