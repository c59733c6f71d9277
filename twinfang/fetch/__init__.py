"""``twinfang fetch-model``: a model's files, from a hub, an object store or a folder.

| module | is |
|---|---|
| `command.py`, `flags.py` | the command and its flags |
| `model_fetch.py` | one fetch: which files a model has, in which order, and when it is whole |
| `partial_model.py` | the files of a model that have come so far, and the lock on its directory |
| `file_fetch.py`, `partial_file.py` | one file: tried again, continued, checked; its bytes so far |
| `checksum.py`, `safetensors_size.py` | what a source, or the file itself, says of its content |
| `source.py` | what every source can do |
| `http_source.py`, `folder_source.py` | sources: files below a URL, files of a folder |
| `s3_source.py` | a source: objects of S3, by signed URLs |
"""
