"""A tiny BERT with random weights in a folder, as transformers saves it, and texts of its words."""

import torch

WORDS = ["the", "a", "of", "one", "tree", "leaf", "node", "list", "value", "is", "are", "and", "with", "to", "every"]


def save_tiny_bert(path):
    """A model with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=64, initializer_range=0.3, **sizes)
    BertModel(config).save_pretrained(path)
    return path


def texts(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    picks = [torch.randint(len(WORDS), (6 + i % 9,), generator=generator).tolist() for i in range(count)]
    return [" ".join(WORDS[i] for i in pick) for pick in picks]
