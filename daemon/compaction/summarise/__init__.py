"""Summarisers: from what a compaction takes away to the text in its place (PROTOCOL.md §5.2).

::

    base       what a summariser is, reads and gives
    offline    the shortened transcript        given   what the client wrote
    online     a model, asked piece by piece (`chunks`) with a `prompt`; `acceptance` looks at what
               it answers

`provider` is what `responses`, `chat` and `anthropic` have in common: the forms in which a model is
asked and answers. Only `http` does I/O, and it is imported when a model is asked the first time.
"""
