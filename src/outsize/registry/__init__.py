"""Who is shown, what each of them agreed to, what came of it, and the gate that asks before every use."""
