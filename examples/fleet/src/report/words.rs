//! Names and numbers → what the page says for them.

/// What a strategy does, in a few words.
pub(super) fn meaning(strategy: &str) -> &'static str {
    match strategy {
        "round_robin" => "the next replica in turn",
        "least_outstanding" => "the replica with the fewest requests in flight",
        "prefix_hash" => "always the same replica for the same beginning",
        "cache_aware" => {
            "where waiting and computing cost least, over all replicas that hold some of the prompt"
        }
        "hybrid" => "the prompt’s home, unless another replica is worth leaving it for",
        _ => "Envoy without the filter",
    }
}

/// What a reason means, in a few words.
pub(super) fn explained(reason: &str) -> &'static str {
    match reason {
        "home" => "the prompt’s home",
        "warm_host" => "another replica costs less and holds more of the prompt",
        "overflow_cost" => "another replica costs less than the home",
        "overflow_waiting" | "overflow_kv_usage" | "overflow_in_flight" => "the home is over a threshold",
        "overflow_failing" => "the home failed lately",
        "table_stale" | "no_table" => "the load of the replicas was not known",
        _ => "no home: decided by load",
    }
}

/// Digits in groups of three.
pub(super) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            out.push('\u{202f}');
        }
        out.push(digit);
    }
    out
}

/// Seconds since the Unix epoch → date and time, UTC; by Howard Hinnant's `civil_from_days`
/// (<https://howardhinnant.github.io/date_algorithms.html>).
pub(super) fn date(unix_s: u64) -> String {
    let days = unix_s / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute) = (unix_s % 86_400 / 3600, unix_s % 3600 / 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_and_large_numbers_read_as_people_write_them() {
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(date(1_796_004_000), "2026-11-30 02:00 UTC");
        assert_eq!(thousands(1_234_567), "1\u{202f}234\u{202f}567");
        assert_eq!(thousands(12), "12");
    }
}
