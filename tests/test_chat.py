"""Conversations as token ids."""

import pytest
from transformers import AutoTokenizer

from dllm_jax import embedded
from dllm_jax.decoding.chat import chat_ids, encode_chats


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded.path("tiny-llada"))


def test_ids_end_where_the_answer_begins_and_batches_are_padded_on_the_left(tokenizer):
    short, long = ([{"role": "user", "content": text}] for text in ("ab", "abcd"))
    ids = chat_ids(tokenizer, long)
    assert tokenizer.decode(ids).endswith("abcd<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    prompt, mask = encode_chats(tokenizer, [short, long], pad_id=7)
    assert prompt.tolist() == [[7, 7, *chat_ids(tokenizer, short)], ids]
    assert mask.sum(axis=1).tolist() == [len(ids) - 2, len(ids)]


def test_nothing_to_answer_and_no_template_are_refused(tokenizer):
    for conversations in ([], [[]]):
        with pytest.raises(ValueError, match="messages are empty"):
            encode_chats(tokenizer, conversations, 0)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        chat_ids(tokenizer, [{"role": "user", "content": "ab"}])
