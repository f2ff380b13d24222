"""Prompts for the benchmarks: short chat requests written for this project, none of them in any
training data of the shipped drafter."""

CHAT = [
    "Explain why the sky is blue to a ten-year-old.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "What are the main differences between a crocodile and an alligator?",
    "Give me five tips for learning a new language as an adult.",
    "Write a polite email asking my landlord to repair the heating.",
    "How does a bicycle stay upright when it moves?",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Describe the process of making bread from flour to loaf.",
    "What is photosynthesis and why is it important?",
    "Suggest a simple dinner with tomatoes, rice and beans.",
    "Summarize the story of Cinderella in a few sentences.",
    "What should I pack for a weekend hike in the mountains?",
    "Explain what inflation is and how it affects families.",
    "Write a poem about the first snow of winter.",
    "How do vaccines protect us from diseases?",
    "What are the advantages of working from home?",
]
