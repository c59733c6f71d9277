"""A certificate and its key are checked when they are read, and a refusal says what to do."""

import datetime

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from wire.errors import ConfigError
from wire.tls.key_pair import MAX_FILE_BYTES, KeyPair
from wire.tls.key_pair_files import KeyPairFiles
from wire.tls.server_context import ServerContext

FAR = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
PASSWORD = b"a word"


def encrypted(files: KeyPairFiles, password_line: bytes) -> KeyPairFiles:
    key = serialization.load_pem_private_key(files.private_key.read_bytes(), None)
    protection = serialization.BestAvailableEncryption(PASSWORD)
    form = serialization.PrivateFormat.PKCS8
    files.private_key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, protection))
    password = files.private_key.with_name("password")
    password.write_bytes(password_line)
    return KeyPairFiles(files.certificate, files.private_key, password)


@pytest.mark.parametrize("key_type", trustme.KeyType)
def test_names_and_expiry_are_those_of_the_certificate(authority, tmp_path, key_type):
    files = authority.write(tmp_path, "llm.example.com", expires=FAR, key_type=key_type)
    pair = KeyPair.read(files)
    assert pair.names == ("localhost", "llm.example.com", "127.0.0.1", "::1")
    assert pair.expires_s == FAR.timestamp()
    assert "PRIVATE" not in repr(pair)
    ServerContext(()).use(pair)


def test_one_file_may_have_both(authority, tmp_path):
    files = authority.write(tmp_path)
    both = tmp_path / "both.pem"
    both.write_bytes(files.private_key.read_bytes() + files.certificate.read_bytes())
    assert KeyPair.read(KeyPairFiles(both, both)) == KeyPair.read(files)


def test_an_encrypted_key_needs_its_password(authority, tmp_path):
    pair = KeyPair.read(authority.write(tmp_path))
    files = encrypted(KeyPairFiles(tmp_path / "tls.crt", tmp_path / "tls.key"), PASSWORD + b"\n")
    assert KeyPair.read(files) == pair
    with pytest.raises(ConfigError, match="it is encrypted: give `ssl_keyfile_password_file`"):
        KeyPair.read(KeyPairFiles(files.certificate, files.private_key))
    files.password.write_bytes(b"another word")
    with pytest.raises(ConfigError, match="is the password right"):
        KeyPair.read(files)


def test_a_password_for_a_key_without_one_is_refused(authority, tmp_path):
    files = authority.write(tmp_path)
    with pytest.raises(ConfigError, match="it is not encrypted"):
        KeyPair.read(KeyPairFiles(files.certificate, files.private_key, files.certificate))


def test_a_key_of_another_certificate_is_refused(authority, tmp_path):
    (tmp_path / "other").mkdir()
    mine, other = authority.write(tmp_path), authority.write(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"{other.private_key} does not belong to the first certificate"):
        KeyPair.read(KeyPairFiles(mine.certificate, other.private_key))


@pytest.mark.parametrize("what", ["certificate", "private_key"])
@pytest.mark.parametrize(
    "content", [b"", b"junk", b"-----BEGIN CERTIFICATE-----\nAAAA\n", b"x" * (MAX_FILE_BYTES + 1)]
)
def test_an_unreadable_file_is_named_and_its_content_is_not_shown(authority, tmp_path, what, content):
    files = authority.write(tmp_path)
    path = getattr(files, what)
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        KeyPair.read(files)
    assert str(path) in refused.value.message
    assert "junk" not in refused.value.message
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        KeyPair.read(files)
