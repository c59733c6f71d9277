"""``twinfang batch``: OpenAI's batch files, on a stack of its own or on any OpenAI endpoint.

| module | is |
|---|---|
| `command.py`, `flags.py` | the command and its flags |
| `input_file.py`, `request_line.py` | the file of requests, checked as a whole; one of its lines |
| `answer_files.py`, `answer_line.py` | the files of answers and errors, one of their lines |
| `job.py` | sends lines until none is left, several at a time |
| `outcome.py` | what an answer, or its absence, means for a line |
| `tries.py` | whose fault it is when a line is not answered |
| `pace.py` | when requests may be sent to an endpoint that is away, and for how long to wait for it |
| `progress.py` | what a person sees meanwhile |
| `unfinished.py` | the error of a batch that can be continued |

The files are the only record of what is done ([why](../../docs/decisions/038-batch-files.md)).
"""
