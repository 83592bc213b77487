"""Heads that need whole rows, through the Trainer: classification of rows and tokens, question answering, a value head, of
decoders and of encoders; masked language models (case 42); Seq2SeqTrainer, which generates in evaluation."""

import copy

import pytest
import torch
from transformers.modeling_outputs import TokenClassifierOutput

from .test_preferences import ALL, PARAMETERS
from .trajectory import LENGTH, tiny_llama, train

RELATIVE = 2e-5


def model_for(task, family="Llama", **settings):
    import transformers

    if family == "Bert":
        torch.manual_seed(0)
        sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
        config = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1)
        config["num_labels"] = 2 if task == "QuestionAnswering" else 3
        return getattr(transformers, f"BertFor{task}")(transformers.BertConfig(**sizes, **config))
    config = copy.deepcopy(tiny_llama().config)
    config.update({"num_labels": 3, "pad_token_id": 0, "classifier_dropout": 0.0, **settings})
    torch.manual_seed(0)
    return getattr(transformers, f"LlamaFor{task}")(config)


def rows_for(task, count=6, length=LENGTH - 1):
    """Rows of different lengths in a batch, padded on the right and on the left; answers in the last shard."""
    generator = torch.Generator().manual_seed(1)
    data = []
    for index in range(count):
        ids = torch.randint(2, 128, (length,), generator=generator)
        mask = torch.ones_like(ids)
        padding = slice(0, 0) if index % 3 == 0 else slice(0, 20) if index % 3 == 1 else slice(length - 40, length)
        ids[padding], mask[padding] = 0, 0
        row = {"input_ids": ids, "attention_mask": mask}
        if task == "SequenceClassification":
            row["labels"] = torch.tensor(index % 3)
        elif task == "TokenClassification":
            row["labels"] = torch.randint(0, 3, (length,), generator=generator).masked_fill(mask == 0, -100)
        elif task == "QuestionAnswering":
            row.update(start_positions=torch.tensor(22 - index), end_positions=torch.tensor(length - 2 if index % 2 else 23))
        else:
            row["labels"] = ids.masked_fill(mask == 0, -100)
        data.append(row)
    return data


class ValueHead(torch.nn.Module):
    """A head for a critic: a scalar per token of the last hidden states, and a loss of one's own on whole rows."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config
        self.value = torch.nn.Linear(model.config.hidden_size, 1)

    def get_input_embeddings(self):
        return self.model.get_input_embeddings()

    def forward(self, input_ids, attention_mask=None, labels=None):
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        values = self.value(out.hidden_states[-1]).squeeze(-1)
        returns = values.detach().flip(1) * 0.9 + 0.1
        kl = out.logits.logsumexp(-1).mean()
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        loss = ((values - returns) ** 2)[mask.bool()].mean() + 0.01 * kl
        return TokenClassifierOutput(loss=loss, logits=values)


def train_head(task, family="Llama", pad_is_eos=False, **settings):
    model = ValueHead(tiny_llama()) if task == "values" else model_for(task, family)
    data, evaluated = rows_for(task), rows_for(task, 3)
    if pad_is_eos:
        model.config.eos_token_id = 0
        for row in data + evaluated:  # Real rows end with it, and hold it in the middle.
            real = row["attention_mask"].nonzero()
            row["input_ids"][real[-1]] = row["input_ids"][real[len(real) // 2]] = 0
    if settings.get("engine") == "fsdp2" and family == "Bert":
        settings["fsdp_config"] = dict(fsdp_version=2, transformer_layer_cls_to_wrap=["BertLayer"])
    settings = {"batch": 2, **settings}
    return train(model=model, data=data, steps=3, eval_data=evaluated, eval_strategy="steps", eval_steps=3, **settings)


# (task, other settings) -> engines
HEADS = [
    ("SequenceClassification", {}, ("zero3", "ddp", "fsdp2")),
    ("TokenClassification", {}, ("ddp", "zero3", "fsdp2")),
    ("QuestionAnswering", {}, ("fsdp2", "ddp", "zero3")),
    ("values", {}, ("zero3", "ddp", "fsdp2")),
    # FSDP2 does not take its shared bias, without sequence parallelism either.
    ("MaskedLM", dict(family="Bert"), ("ddp", "zero3")),
    ("SequenceClassification", dict(family="Bert"), ("fsdp2", "ddp")),  # Its base model pools the first token.
    ("TokenClassification", dict(family="Bert"), ("zero3",)),
    ("QuestionAnswering", dict(family="Bert"), ("ddp",)),
    ("SequenceClassification", dict(pad_is_eos=True), ("ddp",)),
    ("SequenceClassification", dict(batch=1), ("ddp",)),
]
_references = {}


@pytest.mark.parametrize("task,more,engine", [(task, more, engine) for task, more, engines in HEADS for engine in engines[: None if ALL else 1]])
def test_heads(ranks, task, more, engine):
    key = task, repr(more)
    if key not in _references:
        _references[key] = ranks(1).run(train_head, task, **more)[0]
    expected = _references[key]
    for result in ranks(2).run(train_head, task, engine=engine, sp=2, **more):
        assert result["loss"] == pytest.approx(expected["loss"], rel=RELATIVE)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=RELATIVE)
        assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=RELATIVE)
        assert (result["parameters"] - expected["parameters"]).abs().max() < PARAMETERS
        assert result["exchanges"] > 0


def generate_in_evaluation(**settings):
    """Seq2SeqTrainer with a decoder-only model, and what it predicts."""
    import transformers

    def metrics(prediction):
        return {"tokens": float((prediction.predictions != -100).sum()), "sum": float(prediction.predictions.sum())}

    class Seq2Seq(transformers.Seq2SeqTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, compute_metrics=metrics, **kwargs)

    originals = transformers.Trainer, transformers.TrainingArguments
    transformers.Trainer, transformers.TrainingArguments = Seq2Seq, transformers.Seq2SeqTrainingArguments
    try:
        config = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
        more = dict(predict_with_generate=True, generation_config=config, eval_strategy="steps", eval_steps=3)
        evaluated = train(data=rows_for("CausalLM"), eval_data=rows_for("CausalLM", 3), batch=2, steps=3, after=history, **more, **settings)
    finally:
        transformers.Trainer, transformers.TrainingArguments = originals
    return evaluated


def history(trainer):
    return [{key: entry[key] for key in ("eval_loss", "eval_tokens", "eval_sum")} for entry in trainer.state.log_history if "eval_sum" in entry]


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"] if ALL else ["zero3"])
def test_a_decoder_in_the_seq2seq_trainer(ranks, engine):
    expected = ranks(1).run(generate_in_evaluation)[0]
    assert expected["after"]
    for result in ranks(2).run(generate_in_evaluation, engine=engine, sp=2):
        assert result["loss"] == pytest.approx(expected["loss"], rel=RELATIVE)
        assert result["after"] == [pytest.approx(entry, rel=RELATIVE) for entry in expected["after"]]
        assert (result["parameters"] - expected["parameters"]).abs().max() < PARAMETERS
