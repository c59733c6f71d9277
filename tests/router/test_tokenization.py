from tests.router.conftest import MODEL
from tests.router.scripted_servers import MAX_MODEL_LEN


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
