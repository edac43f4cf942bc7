"""The text of documents: plain text, HTML, PDF, Office and mail. An unreadable file is a sentence, not an error.

Parsing runs in a process with little memory, an empty environment and a deadline: a hostile file can waste a minute of
that process, and nothing else. Texts are split into chunks that a model can read one by one. All functions except
`extract_text` block.
"""
