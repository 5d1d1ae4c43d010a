"""Other libraries' models on tokenloom. Each module needs its library, and nothing imports them unasked."""
