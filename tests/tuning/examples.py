"""What tests of tuning learn."""

EXAMPLES = [
    {"context": "the cat sat on the mat " * (i % 4), "question": f"what is {i}?", "answer": "it is " * (i % 5) + str(i)} for i in range(12)
]
