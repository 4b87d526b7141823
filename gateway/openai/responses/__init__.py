"""`/v1/responses`: OpenAI's Responses API on top of chat completions.

A request is converted to the body of a chat completion, and its reply is made of that completion's reply. So sampling,
formats, tools and their streams exist once. Parameters that chat completions refuse are refused under this API's names.
"""
