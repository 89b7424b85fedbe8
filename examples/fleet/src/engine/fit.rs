//! Measured times → the coefficients of [`StepTimes`].
//!
//! Least squares over relative errors, with Huber weights so that a step which the machine interrupted counts little, and
//! no coefficient below zero. It must never see a clock or a server: what was measured comes in as numbers.

use super::front_end::FrontEnd;
use super::model::{StepLoad, StepTimes};

/// A time that was measured, and the work done in it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Observation {
    /// Microseconds.
    pub time_us: f64,
    /// Steps in that time.
    pub steps: f64,
    /// Work of all these steps.
    pub load: StepLoad,
    /// Prompt tokens that went through the server's front end in that time; `None` when no request did.
    pub through_front_end: Option<usize>,
}

impl Observation {
    /// The time from sending a prompt to its first token on an idle engine, `cached_tokens` of it being cached.
    pub fn of_prefill(time_us: f64, prompt_tokens: usize, cached_tokens: usize, step_tokens: usize) -> Self {
        let (mut load, mut steps, mut context) = (StepLoad::default(), 0.0, cached_tokens);
        while context < prompt_tokens {
            let chunk = step_tokens.max(1).min(prompt_tokens - context);
            load.add_prefill(chunk, context);
            context += chunk;
            steps += 1.0;
        }
        Self {
            time_us,
            steps,
            load,
            through_front_end: Some(prompt_tokens),
        }
    }

    /// The time between two tokens of requests that decode together over `contexts`.
    pub fn of_decode(time_us: f64, contexts: impl IntoIterator<Item = usize>) -> Self {
        let mut load = StepLoad::default();
        contexts.into_iter().for_each(|context| load.add_decode(context));
        Self {
            time_us,
            steps: 1.0,
            load,
            through_front_end: None,
        }
    }

    /// The time of one step that prefills `prompt_tokens`, `cached_tokens` of them being cached, beside requests that
    /// decode over `contexts`.
    pub fn of_mixed_step(
        time_us: f64,
        prompt_tokens: usize,
        cached_tokens: usize,
        contexts: impl IntoIterator<Item = usize>,
    ) -> Self {
        let mut observation = Self::of_decode(time_us, contexts);
        observation
            .load
            .add_prefill(prompt_tokens.saturating_sub(cached_tokens), cached_tokens);
        observation
    }

    fn row(&self) -> [f64; TERMS] {
        [
            f64::from(u8::from(self.through_front_end.is_some())),
            self.through_front_end.unwrap_or(0) as f64,
            self.steps,
            self.load.prefill_tokens as f64,
            self.load.prefill_pairs,
            self.load.decodes as f64,
            self.load.decode_context as f64,
        ]
    }
}

/// What explains the observations best.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fit {
    /// Time of a request in the front end: parsing, hand-over, sending; not part of a step.
    pub front_end_us: f64,
    /// Time of each token of its prompt there, cached or not.
    pub front_end_token_us: f64,
    /// Coefficients of a step.
    pub times: StepTimes,
    /// Median of |predicted − measured| ÷ measured.
    pub median_error: f64,
}

impl Fit {
    /// The front end by this fit.
    pub fn front_end(&self, shares_core: bool) -> FrontEnd {
        FrontEnd {
            request_us: self.front_end_us,
            prompt_token_us: self.front_end_token_us,
            shares_core,
        }
    }

    /// Fits coefficients to observations; `None` when there are too few of them.
    pub fn of(observations: &[Observation]) -> Option<Self> {
        let usable: Vec<_> = observations.iter().filter(|o| o.time_us > 0.0).collect();
        if usable.len() < TERMS {
            return None;
        }
        let rows: Vec<[f64; TERMS]> = usable
            .iter()
            .map(|o| o.row().map(|term| term / o.time_us))
            .collect();
        let mut weights = vec![1.0; rows.len()];
        let mut coefficients = [0.0; TERMS];
        let errors = |coefficients: &[f64; TERMS]| -> Vec<f64> {
            rows.iter()
                .map(|row| (dot(row, coefficients) - 1.0).abs())
                .collect()
        };
        for _ in 0..ROUNDS {
            coefficients = non_negative(&rows, &weights);
            let errors = errors(&coefficients);
            let bound = (HUBER * median(&errors)).max(1e-9);
            for (weight, error) in weights.iter_mut().zip(errors) {
                *weight = if error <= bound { 1.0 } else { bound / error };
            }
        }
        let [
            front_end_us,
            front_end_token_us,
            base_us,
            prefill_token_us,
            prefill_pair_us,
            decode_us,
            decode_context_us,
        ] = coefficients;
        Some(Self {
            front_end_us,
            front_end_token_us,
            times: StepTimes {
                base_us,
                prefill_token_us,
                prefill_pair_us,
                decode_us,
                decode_context_us,
            },
            median_error: median(&errors(&coefficients)),
        })
    }
}

/// Least squares for `row · x = 1` without negative coefficients: the most negative one is left out until there is none.
fn non_negative(rows: &[[f64; TERMS]], weights: &[f64]) -> [f64; TERMS] {
    let mut kept = [true; TERMS];
    loop {
        let solution = least_squares(rows, weights, kept);
        let worst = (0..TERMS)
            .filter(|term| solution[*term] < 0.0)
            .min_by(|a, b| share(rows, &solution, *a).total_cmp(&share(rows, &solution, *b)));
        match worst {
            Some(term) => kept[term] = false,
            None => return solution,
        }
    }
}

/// What a term contributes over all rows.
fn share(rows: &[[f64; TERMS]], solution: &[f64; TERMS], term: usize) -> f64 {
    solution[term] * rows.iter().map(|row| row[term]).sum::<f64>()
}

fn least_squares(rows: &[[f64; TERMS]], weights: &[f64], kept: [bool; TERMS]) -> [f64; TERMS] {
    // Columns differ by nine orders of magnitude: each is scaled to length one.
    let scale: [f64; TERMS] = std::array::from_fn(|term| {
        let square: f64 = rows.iter().map(|row| row[term] * row[term]).sum();
        if kept[term] && square > 0.0 {
            1.0 / square.sqrt()
        } else {
            0.0
        }
    });
    let mut system = [[0.0; TERMS + 1]; TERMS];
    for (row, weight) in rows.iter().zip(weights) {
        for (i, equation) in system.iter_mut().enumerate() {
            let scaled = weight * row[i] * scale[i];
            for (j, cell) in equation.iter_mut().take(TERMS).enumerate() {
                *cell += scaled * row[j] * scale[j];
            }
            equation[TERMS] += scaled;
        }
    }
    for pivot in 0..TERMS {
        if let Some(best) =
            (pivot..TERMS).max_by(|a, b| system[*a][pivot].abs().total_cmp(&system[*b][pivot].abs()))
        {
            system.swap(pivot, best);
        }
        if system[pivot][pivot].abs() < 1e-12 {
            // A term that was left out, or that nothing measured tells apart from another.
            continue;
        }
        let leading = system[pivot];
        for (i, equation) in system.iter_mut().enumerate() {
            if i != pivot {
                let factor = equation[pivot] / leading[pivot];
                for (cell, from) in equation.iter_mut().zip(leading) {
                    *cell -= factor * from;
                }
            }
        }
    }
    std::array::from_fn(|term| {
        if system[term][term].abs() < 1e-12 {
            return 0.0;
        }
        system[term][TERMS] / system[term][term] * scale[term]
    })
}

fn dot(row: &[f64; TERMS], coefficients: &[f64; TERMS]) -> f64 {
    row.iter().zip(coefficients).map(|(a, b)| a * b).sum()
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

/// Requests and prompt tokens in the front end, steps, and the four terms of a step's load.
const TERMS: usize = 7;
/// Rounds of reweighting; the weights have settled long before.
const ROUNDS: usize = 30;
/// Errors up to this many medians count in full: 1.345 standard deviations of a normal distribution
/// (Huber, Robust Statistics, 1981) are two medians.
const HUBER: f64 = 2.0;

#[cfg(test)]
mod tests {
    use super::*;

    const TRUE: Fit = Fit {
        front_end_us: 4_000.0,
        front_end_token_us: 2.0,
        times: StepTimes {
            base_us: 9_000.0,
            prefill_token_us: 250.0,
            prefill_pair_us: 0.02,
            decode_us: 1_500.0,
            decode_context_us: 0.9,
        },
        median_error: 0.0,
    };

    fn exact() -> Vec<Observation> {
        let mut observations = Vec::new();
        for prompt_tokens in [200, 500, 1_000, 2_000, 4_000, 6_000] {
            for cached_tokens in [0, prompt_tokens / 2, prompt_tokens - 20] {
                observations.push(Observation::of_prefill(0.0, prompt_tokens, cached_tokens, 2_048));
            }
            for chunk in [300, 1_500] {
                observations.push(Observation::of_mixed_step(
                    0.0,
                    prompt_tokens + chunk,
                    prompt_tokens,
                    [400],
                ));
            }
            for together in [1, 2, 4] {
                observations.push(Observation::of_decode(0.0, vec![prompt_tokens; together]));
            }
        }
        for observation in &mut observations {
            let front_end = TRUE.front_end(false);
            observation.time_us = observation
                .through_front_end
                .map_or(0.0, |prompt_tokens| front_end.work_us(prompt_tokens))
                + (observation.steps - 1.0) * TRUE.times.base_us
                + TRUE.times.step_us(&observation.load);
        }
        observations
    }

    fn assert_close(fit: &Fit, tolerance: f64) {
        let pairs = [
            (fit.front_end_us, TRUE.front_end_us),
            (fit.front_end_token_us, TRUE.front_end_token_us),
            (fit.times.base_us, TRUE.times.base_us),
            (fit.times.prefill_token_us, TRUE.times.prefill_token_us),
            (fit.times.prefill_pair_us, TRUE.times.prefill_pair_us),
            (fit.times.decode_us, TRUE.times.decode_us),
            (fit.times.decode_context_us, TRUE.times.decode_context_us),
        ];
        for (fitted, expected) in pairs {
            assert!((fitted / expected - 1.0).abs() < tolerance, "{fit:?}");
        }
    }

    #[test]
    fn exact_times_give_their_coefficients_back() {
        assert_close(&Fit::of(&exact()).unwrap(), 1e-6);
    }

    #[test]
    fn interrupted_steps_hardly_move_the_fit() {
        let mut observations = exact();
        for (number, observation) in observations.iter_mut().enumerate() {
            observation.time_us *= match number % 9 {
                0 => 3.0,
                n => 1.0 + 0.002 * (n as f64 - 4.5),
            };
        }
        assert_close(&Fit::of(&observations).unwrap(), 0.15);
    }

    #[test]
    fn no_coefficient_is_negative() {
        let mut observations = exact();
        for observation in &mut observations {
            // Faster over long contexts: the attention terms would have to be negative.
            observation.time_us /= 1.0 + observation.load.prefill_pairs.sqrt() / 1_000.0;
        }
        let fit = Fit::of(&observations).unwrap();
        assert!(fit.times.prefill_pair_us >= 0.0 && fit.times.base_us >= 0.0 && fit.front_end_us >= 0.0);
        assert_eq!(Fit::of(&observations[..3]), None);
    }
}
