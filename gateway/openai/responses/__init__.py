"""`/v1/responses`: OpenAI's Responses API over the chat path.

A request becomes the body of a chat completion, and its reply is made of that completion's: so sampling, formats, tools
and their streams exist once. What the chat path refuses is refused here under the name that it has here.
"""
