import threading

import pytest

from router import heap
from router.models import prompt, tokenizer
from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import MAX_MODEL_LEN


async def test_a_text_and_a_chat_are_tokenized_and_back(make_stack, words):
    stack = await make_stack()
    text = "hello wörld"
    told = (await stack.client.post("/tokenize", json={"model": MODEL, "prompt": text})).json()
    tokens = words.encode_now(text)
    expected = {"count": len(tokens), "max_model_len": MAX_MODEL_LEN, "tokens": tokens, "token_strs": None}
    assert told == expected
    named = await stack.client.post("/tokenize", json={"prompt": text, "return_token_strs": True})
    assert named.json()["token_strs"] == [words.decode_token(token_id) for token_id in tokens]

    chat = {"messages": [{"role": "user", "content": "hello"}], "add_generation_prompt": False}
    tokens = (await stack.client.post("/tokenize", json=chat)).json()["tokens"]
    back = await stack.client.post("/detokenize", json={"model": MODEL, "tokens": tokens})
    assert back.json() == {"prompt": "<s>user\nhello</s>\n"}


async def test_what_can_not_be_tokenized_is_refused(make_stack):
    stack = await make_stack()
    bad = [
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": 5}, 400, "valid string"),
        ("/tokenize", {"messages": []}, 400, "at least one message"),
        ("/tokenize", {"model": "another", "prompt": "a"}, 404, "another"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "valid integer"),
        ("/detokenize", {"tokens": [-1]}, 400, "got -1"),
        ("/detokenize", {"tokens": [1 << 40]}, 400, "between 0 and"),
        ("/detokenize", {"model": "another", "tokens": []}, 404, "another"),
    ]
    for url, body, status, part in bad:
        response = await stack.client.post(url, json=body)
        assert response.status_code == status, (url, body)
        assert part in response.json()["error"]["message"]
    beyond = await stack.client.post("/detokenize", json={"tokens": [70, 100_000]})
    assert len(beyond.json()["prompt"]) == 1
    assert (await stack.client.post("/tokenize", json={"prompt": ""})).json()["count"] == 0


@pytest.mark.parametrize(
    "body", [{"prompt": "w" * 1_000_000}, {"messages": [{"role": "user", "content": "w" * 10**6}]}]
)
@pytest.mark.parametrize("ready", [True, False])
async def test_a_text_that_is_far_too_long_is_refused_before_any_work(make_stack, monkeypatch, body, ready):
    monkeypatch.setattr(prompt, "UNTOLD_MODEL_LEN", MAX_MODEL_LEN)
    stack = await make_stack(ready=ready, num_decode=int(ready) or 1)
    encoded = []
    monkeypatch.setattr(stack.tokenizer, "encode_now", lambda text, **_: encoded.append(text) or [5])
    longest = stack.tokenizer.max_token_chars * MAX_MODEL_LEN
    refused = await stack.client.post("/tokenize", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
    assert f"{MAX_MODEL_LEN} tokens" in error["message"]
    assert "1000000 characters" in error["message"]
    assert not encoded
    for size, status in ((longest, 200), (longest + 1, 400), (100 * longest, 400)):
        monkeypatch.setattr(prompt, "HEAD_CHARS_A_TOKEN", longest)
        answer = await stack.client.post("/tokenize", json={"prompt": "w" * size})
        assert answer.status_code == status


async def test_a_text_of_too_many_tokens_is_refused_by_its_beginning(make_stack, monkeypatch):
    stack = await make_stack()
    encoded = []
    encode_now = stack.tokenizer.encode_now
    monkeypatch.setattr(
        stack.tokenizer, "encode_now", lambda text, **_: encoded.append(len(text)) or encode_now(text)
    )
    num_head_chars = prompt.HEAD_CHARS_A_TOKEN * MAX_MODEL_LEN
    monkeypatch.setattr(
        stack.tokenizer, "max_token_chars", None
    )  # as with a normalizer, which may shorten texts
    for url in ("/tokenize", "/v1/completions"):
        encoded.clear()
        refused = await stack.client.post(url, json={"prompt": "w" * 1_000_000})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert (
            f"1000000 characters, of which the first {num_head_chars} are"
            in refused.json()["error"]["message"]
        )
        assert encoded == [num_head_chars]


async def test_names_of_many_tokens_and_their_text_are_made_beside_the_event_loop(make_stack, monkeypatch):
    stack = await make_stack()
    threads = set()
    decode_token, decode = stack.tokenizer.decode_token, stack.tokenizer.decode

    def noting(work):
        def noted(*args, **kwargs):
            threads.add(threading.current_thread().name.partition("_")[0])
            return work(*args, **kwargs)

        return noted

    monkeypatch.setattr(stack.tokenizer, "decode_token", noting(decode_token))
    monkeypatch.setattr(stack.tokenizer, "decode", noting(decode))
    monkeypatch.setattr(prompt, "HEAD_CHARS_A_TOKEN", 100)
    monkeypatch.setattr(stack.tokenizer, "max_token_chars", None)
    text = "hello " * 1500
    told = await stack.client.post("/tokenize", json={"prompt": text, "return_token_strs": True})
    assert "".join(told.json()["token_strs"]) == text
    assert threads == {"tokenize"}
    threads.clear()
    back = await stack.client.post("/detokenize", json={"tokens": told.json()["tokens"]})
    assert back.json() == {"prompt": text}
    assert threads == {"tokenize"}


async def test_memory_is_given_back_after_a_large_text(words, monkeypatch):
    given_back = []
    monkeypatch.setattr(tokenizer, "give_back", lambda: given_back.append(threading.current_thread().name))
    await words.encode("a" * (tokenizer.LARGE - 1))
    assert not given_back
    await words.encode("a" * tokenizer.LARGE)
    assert given_back[0].startswith("tokenize")
    heap.give_back()
