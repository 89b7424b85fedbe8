//! The engine against arithmetic done by hand, and against what must hold for any sequence of requests.

use super::*;

/// 1 000 tokens a second and 10 ms a step, so that sums can be done in the head.
fn plain(cache_blocks: usize) -> EngineModel {
    EngineModel {
        cache_blocks,
        block_tokens: 16,
        max_running: 4,
        step_tokens: 8192,
        times: StepTimes {
            base_us: 10_000.0,
            prefill_token_us: 1_000.0,
            ..StepTimes::default()
        },
        speed: 1.0,
    }
}

/// A prompt of which no block is shared with one of another family.
fn prompt(family: u64, tokens: usize) -> Prompt {
    let names: Vec<u64> = (0..tokens as u64 / 16)
        .map(|block| family << 32 | block)
        .collect();
    Prompt::from_blocks(names, tokens)
}

fn event(id: RequestId, at_us: u64, kind: EventKind) -> EngineEvent {
    EngineEvent { id, at_us, kind }
}

fn prefilled(events: &[EngineEvent], id: RequestId) -> (u64, usize) {
    let found = events.iter().find_map(|event| match event.kind {
        EventKind::Prefilled { cached_tokens } if event.id == id => Some((event.at_us, cached_tokens)),
        _ => None,
    });
    found.expect("prefilled")
}

fn random(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed;
    move |below| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below.max(1)
    }
}

const FOREVER: u64 = u64::MAX / 2;

#[test]
fn a_step_lasts_as_long_as_its_five_terms_say() {
    let mut engine = Engine::new(EngineModel {
        step_tokens: 100,
        times: StepTimes {
            base_us: 1_000.0,
            prefill_token_us: 10.0,
            prefill_pair_us: 0.5,
            decode_us: 30.0,
            decode_context_us: 2.0,
        },
        ..plain(64)
    });
    let id = engine.submit(5, prompt(1, 150), 3).unwrap();
    let events = engine.advance(FOREVER);
    // A chunk of 100 with a mean context of 50, then one of 50 with 125, then decodes over 151 and 152 tokens.
    let first = 5 + 1_000 + 1_000 + 2_500;
    let second = first + 1_000 + 500 + 3_125;
    let third = second + 1_000 + 30 + 302;
    let fourth = third + 1_000 + 30 + 304;
    let expected = [
        event(id, second, EventKind::Prefilled { cached_tokens: 0 }),
        event(id, third, EventKind::Token),
        event(id, fourth, EventKind::Token),
        event(id, fourth, EventKind::Finished),
    ];
    assert_eq!(events, expected);
    let counters = engine.counters();
    assert_eq!((counters.steps, counters.busy_us), (4, fourth - 5));
    assert_eq!(counters.prefill_busy_us, 1_000 + 2_500 + 500 + 3_125);
    assert_eq!(
        (engine.running(), engine.waiting(), engine.kv_usage()),
        (0, 0, 0.0)
    );
}

#[test]
fn decodes_of_several_requests_share_one_step() {
    let mut engine = Engine::new(EngineModel {
        times: StepTimes {
            base_us: 1_000.0,
            decode_us: 100.0,
            decode_context_us: 1.0,
            ..StepTimes::default()
        },
        ..plain(64)
    });
    let first = engine.submit(0, prompt(1, 20), 3).unwrap();
    let second = engine.submit(0, prompt(2, 40), 2).unwrap();
    let events = engine.advance(FOREVER);
    // Prefill of the first; its decode over 21 beside the prefill of the second; decodes over 22 and 41.
    let (a, b) = (1_000, 1_000 + 1_000 + 100 + 21);
    let c = b + 1_000 + 200 + 22 + 41;
    let expected = [
        event(first, a, EventKind::Prefilled { cached_tokens: 0 }),
        event(first, b, EventKind::Token),
        event(second, b, EventKind::Prefilled { cached_tokens: 0 }),
        event(first, c, EventKind::Token),
        event(first, c, EventKind::Finished),
        event(second, c, EventKind::Token),
        event(second, c, EventKind::Finished),
    ];
    assert_eq!(events, expected);
}

#[test]
fn decodes_go_on_while_a_long_prompt_is_cut_into_chunks() {
    let mut engine = Engine::new(EngineModel {
        step_tokens: 100,
        ..plain(256)
    });
    let short = engine.submit(0, prompt(1, 10), 50).unwrap();
    let long = engine.submit(0, prompt(2, 990), 1).unwrap();
    let mut events = Vec::new();
    engine.advance_into(0, &mut events);
    while !events.iter().any(|event| event.id == long) {
        let next_us = engine.next_event_us().unwrap();
        engine.advance_into(next_us, &mut events);
        assert!(engine.step().is_none_or(|step| step.load.tokens() <= 100));
    }
    let tokens = events.iter().filter(|event| event.id == short).count();
    assert_eq!(
        tokens, 11,
        "one token with each of ten chunks of 99, after the first"
    );
}

#[test]
fn a_repeated_prompt_hits_all_whole_blocks_but_computes_its_last_token() {
    for (tokens, hit) in [(160, 144), (161, 160), (175, 160), (16, 0), (17, 16)] {
        let mut engine = Engine::new(plain(64));
        engine.submit(0, prompt(1, tokens), 1).unwrap();
        engine.advance(FOREVER / 2);
        let now_us = FOREVER / 2;
        assert_eq!(engine.cached_tokens_of(&prompt(1, tokens)), hit);
        let again = engine.submit(now_us, prompt(1, tokens), 1).unwrap();
        let (at_us, cached) = prefilled(&engine.advance(FOREVER), again);
        assert_eq!(cached, hit);
        assert_eq!(at_us - now_us, 10_000 + 1_000 * (tokens - hit) as u64);
        assert_eq!(engine.counters().prefix_query_tokens, 2 * tokens as u64);
        assert_eq!(engine.counters().prefix_hit_tokens, hit as u64);
    }
}

#[test]
fn a_shared_prefix_hits_up_to_the_first_difference() {
    let mut engine = Engine::new(EngineConfig::instant());
    let mut first = vec![b's'; 640];
    let mut second = first.clone();
    first.extend_from_slice(&[b'a'; 100]);
    second.extend_from_slice(&[b'b'; 100]);
    engine.submit(0, Prompt::new(&first), 1).unwrap();
    let id = engine.submit(0, Prompt::new(&second), 1).unwrap();
    assert_eq!(prefilled(&engine.advance(0), id), (0, 160));
}

#[test]
fn a_twin_in_the_same_step_hits_what_is_being_computed() {
    let mut engine = Engine::new(plain(64));
    engine.submit(0, prompt(9, 1), 1).unwrap();
    let ids = [0, 1].map(|_| engine.submit(0, prompt(1, 100), 1).unwrap());
    let events = engine.advance(FOREVER);
    let both = 11_000 + 10_000 + (100 + 4) * 1_000;
    assert_eq!(ids.map(|id| prefilled(&events, id)), [(both, 0), (both, 96)]);
}

#[test]
fn output_takes_blocks_while_it_runs_and_is_no_hit_afterwards() {
    let mut engine = Engine::new(plain(16));
    engine.submit(0, prompt(1, 64), 100).unwrap();
    engine.advance(64_000 + 10_000 * 50);
    assert_eq!(
        engine.kv_usage(),
        8.0 / 16.0,
        "64 + 49 tokens are kept: eight blocks"
    );
    engine.advance(FOREVER);
    let snapshot = engine.snapshot();
    assert_eq!((snapshot.kv_usage, snapshot.cached_blocks), (0.0, 4));
    // Seven blocks of output and five never used are given up before the four of the prompt, then its tail.
    engine.submit(FOREVER, prompt(2, 16 * 12), 1).unwrap();
    assert_eq!(engine.cached_tokens_of(&prompt(1, 65)), 64);
    engine.submit(FOREVER, prompt(3, 15), 1).unwrap();
    engine.advance(u64::MAX);
    assert_eq!(engine.cached_tokens_of(&prompt(1, 65)), 48);
}

#[test]
fn the_least_recently_used_prompt_is_forgotten_first() {
    let mut engine = Engine::new(plain(30));
    let mut now_us = 0;
    let mut run = |engine: &mut Engine, family: u64| {
        let id = engine.submit(now_us, prompt(family, 160), 1).unwrap();
        now_us += 1_000_000;
        prefilled(&engine.advance(now_us), id).1
    };
    assert_eq!([run(&mut engine, 1), run(&mut engine, 2)], [0, 0]);
    assert_eq!(
        run(&mut engine, 1),
        144,
        "both fit, and the first is now the younger"
    );
    assert_eq!(run(&mut engine, 3), 0);
    assert_eq!(run(&mut engine, 4), 0);
    assert!(run(&mut engine, 1) > 0, "it was used after the second");
    assert_eq!(
        engine.cached_tokens_of(&prompt(2, 160)),
        0,
        "the second had to make room"
    );
}

#[test]
fn a_prompt_waits_until_it_fits_as_a_whole() {
    let mut engine = Engine::new(plain(10));
    let holder = engine.submit(0, prompt(1, 90), 3).unwrap();
    let waiter = engine.submit(0, prompt(2, 70), 1).unwrap();
    let behind = engine.submit(0, prompt(3, 10), 1).unwrap();
    let events = engine.advance(FOREVER);
    let ends: Vec<_> = events
        .iter()
        .filter(|event| event.kind == EventKind::Finished)
        .map(|event| (event.id, event.at_us))
        .collect();
    let holder_ends = 100_000 + 2 * 10_000;
    let others_end = holder_ends + 10_000 + 80_000;
    assert_eq!(
        ends,
        [(holder, holder_ends), (waiter, others_end), (behind, others_end)],
        "nobody overtakes the head of the queue"
    );
}

#[test]
fn the_youngest_gives_up_its_blocks_and_resumes_where_it_was() {
    // Two prompts of four blocks each in nine: the ninth goes to the elder's output, and then there is none.
    let mut engine = Engine::new(plain(9));
    let elder = engine.submit(0, prompt(1, 64), 20).unwrap();
    let younger = engine.submit(0, prompt(2, 64), 20).unwrap();
    let events = engine.advance(FOREVER);
    let preempted: Vec<_> = events
        .iter()
        .filter(|event| event.kind == EventKind::Preempted)
        .map(|event| event.id)
        .collect();
    assert_eq!(preempted, [younger]);
    for id in [elder, younger] {
        let tokens = events
            .iter()
            .filter(|event| {
                event.id == id && matches!(event.kind, EventKind::Token | EventKind::Prefilled { .. })
            })
            .count();
        assert_eq!(tokens, 20, "each token is emitted once");
    }
    let counters = engine.counters();
    assert_eq!((counters.preemptions, counters.finished), (1, 2));
    assert_eq!(
        counters.prefix_query_tokens, 128,
        "a resumed request is not looked up anew"
    );
    assert!(
        counters.computed_prefill_tokens > 128,
        "but what it lost is computed again"
    );
    assert_eq!(counters.prompt_tokens, 128);
}

#[test]
fn no_more_than_max_running_run_at_once() {
    let mut engine = Engine::new(plain(256));
    for family in 0..10 {
        engine.submit(0, prompt(family, 10), 100).unwrap();
    }
    engine.advance(500_000);
    assert_eq!((engine.running(), engine.waiting()), (4, 6));
}

#[test]
fn cancelled_requests_leave_queue_batch_and_cache() {
    let mut engine = Engine::new(plain(256));
    let ids: Vec<_> = (0..6)
        .map(|family| engine.submit(0, prompt(family, 100), 50).unwrap())
        .collect();
    engine.advance(120_000);
    assert_eq!((engine.running(), engine.waiting()), (4, 2));
    for id in &ids {
        assert!(engine.cancel(*id));
        assert!(!engine.cancel(*id));
    }
    assert_eq!(
        (engine.running(), engine.waiting(), engine.kv_usage()),
        (0, 0, 0.0)
    );
    assert_eq!(engine.counters().aborted, 6);
    assert!(engine.advance(10_000_000).is_empty());
    let next = engine.submit(10_000_000, prompt(0, 100), 1).unwrap();
    assert_eq!(
        prefilled(&engine.advance(11_000_000), next).1,
        96,
        "what had been computed stays cached"
    );
}

#[test]
fn a_prompt_that_can_never_fit_is_refused() {
    let refused = Engine::new(plain(10)).submit(0, prompt(1, 160), 1);
    let (tokens, capacity_tokens) = (161, 160);
    assert_eq!(
        refused,
        Err(Refusal::PromptTooLong {
            tokens,
            capacity_tokens
        })
    );
    assert!(Engine::new(plain(10)).submit(0, prompt(1, 159), 1).is_ok());
}

#[test]
fn slowness_and_speed_scale_a_step() {
    for (permille, speed, expected_us) in [(3_000, 1.0, 330_000), (1_000, 10.0, 11_000), (500, 0.5, 110_000)]
    {
        let mut engine = Engine::new(plain(64).at_speed(speed));
        engine.set_slow_permille(permille);
        engine.submit(0, prompt(1, 100), 1).unwrap();
        assert_eq!(engine.next_event_us(), Some(expected_us));
    }
}

#[test]
fn a_restart_loses_everything_but_the_numbers_of_requests() {
    let mut engine = Engine::new(plain(64));
    engine.submit(0, prompt(1, 64), 1).unwrap();
    engine.advance(200_000);
    let lost: Vec<_> = (2..8)
        .map(|family| engine.submit(200_000, prompt(family, 64), 9).unwrap())
        .collect();
    engine.advance(300_000);
    assert_eq!(engine.restart(), lost);
    assert_eq!(engine.snapshot(), Engine::new(plain(64)).snapshot());
    assert_eq!(engine.next_event_us(), None);
    let fresh = engine.submit(300_000, prompt(1, 64), 1).unwrap();
    assert!(lost.iter().all(|id| *id < fresh));
    assert_eq!(prefilled(&engine.advance(FOREVER), fresh).1, 0);
}

#[test]
fn backlog_is_what_prefill_has_still_to_compute() {
    let mut engine = Engine::new(plain(64));
    engine.submit(0, prompt(1, 64), 1).unwrap();
    engine.advance(100_000);
    assert_eq!(engine.prefill_backlog_tokens(), 0);
    engine.submit(100_000, prompt(2, 50), 9).unwrap();
    engine.submit(100_000, prompt(1, 70), 1).unwrap();
    assert_eq!(engine.prefill_backlog_tokens(), 50 + 6);
    engine.advance(160_000);
    assert_eq!(
        engine.prefill_backlog_tokens(),
        6,
        "the first decodes, the second is in its step"
    );
    engine.advance(FOREVER);
    assert_eq!(engine.prefill_backlog_tokens(), 0);
}

/// A mix of everything on a small engine, told the time in strides of `stride_us`; checks what must hold at all times.
fn mixed(seed: u64, stride_us: u64) -> (Vec<EngineEvent>, EngineCounters) {
    let mut random = random(seed);
    let model = EngineModel {
        max_running: 6,
        step_tokens: 96,
        times: StepTimes {
            base_us: 700.0,
            prefill_token_us: 13.0,
            prefill_pair_us: 0.01,
            decode_us: 21.0,
            decode_context_us: 0.3,
        },
        ..plain(40)
    };
    let capacity = model.cache_blocks;
    let mut engine = Engine::new(model);
    let (mut events, mut now_us) = (Vec::new(), 0_u64);
    let mut taken = Vec::new();
    for _ in 0..120 {
        let arrives_us = now_us + random(4_000);
        while now_us < arrives_us {
            now_us = arrives_us.min(now_us + stride_us);
            engine.advance_into(now_us, &mut events);
            assert!(
                engine.step().is_none_or(|step| step.load.tokens() <= 96),
                "seed {seed}"
            );
            assert!(engine.cache.held_blocks() <= capacity, "seed {seed}");
            assert!(engine.cache.named_blocks() <= capacity, "seed {seed}");
            assert!(engine.running() <= 6, "seed {seed}");
        }
        let (family, tokens) = (random(5), 1 + random(400) as usize);
        let output = 1 + random(60) as usize;
        taken.extend(engine.submit(now_us, prompt(family, tokens), output).ok());
        if random(8) == 0 {
            let victim = taken[random(taken.len() as u64) as usize];
            engine.cancel(victim);
        }
    }
    engine.advance_into(FOREVER, &mut events);
    assert_eq!(
        (engine.running(), engine.waiting(), engine.kv_usage()),
        (0, 0, 0.0),
        "seed {seed}"
    );
    let counters = engine.counters();
    assert_eq!(counters.submitted as usize, taken.len());
    assert_eq!(
        counters.finished + counters.aborted,
        counters.submitted,
        "seed {seed}"
    );
    (events, counters)
}

#[test]
fn budget_cache_and_requests_are_conserved_in_any_mix() {
    let mut preemptions = 0;
    for seed in 1..=60 {
        let (events, counters) = mixed(seed, 500);
        preemptions += counters.preemptions;
        let count =
            |wanted: fn(&EventKind) -> bool| events.iter().filter(|event| wanted(&event.kind)).count() as u64;
        assert_eq!(count(|kind| *kind == EventKind::Finished), counters.finished);
        assert_eq!(count(|kind| *kind == EventKind::Preempted), counters.preemptions);
        let tokens = count(|kind| matches!(kind, EventKind::Token | EventKind::Prefilled { .. }));
        assert_eq!(tokens, counters.generation_tokens);
        assert!(counters.prefix_hit_tokens > 0 && counters.prefix_hit_tokens < counters.prefix_query_tokens);
    }
    assert!(
        preemptions > 0,
        "the mix is too tame to say anything about preemption"
    );
}

#[test]
fn equal_inputs_give_equal_events_however_often_time_is_told() {
    for seed in 1..=20 {
        let often = mixed(seed, 37);
        assert_eq!(often, mixed(seed, 37), "seed {seed}");
        assert_eq!(often, mixed(seed, FOREVER), "seed {seed}");
    }
}

/// As long as the conversation trace of Mooncake: 12 000 requests of 12 000 tokens and 340 of output over eight engines,
/// here with 60 tokens of output in 100 s so that an unoptimised build stays quick; the time is printed.
#[test]
fn twelve_thousand_long_requests_run_through_eight_engines() {
    let mut random = random(7);
    let began = std::time::Instant::now();
    let mut engines: Vec<_> = (0..8)
        .map(|_| {
            let mut engine = Engine::new(EngineModel::llama_70b_h100x4().at_speed(20.0));
            engine.set_token_events(false);
            engine
        })
        .collect();
    let mut events = Vec::new();
    for number in 0..12_000_u64 {
        let now_us = number * 14_750;
        let conversation = random(1_500);
        let tokens = 1 + random(24_000) as usize;
        let home = &mut engines[conversation as usize % 8];
        home.advance_into(now_us, &mut events);
        home.submit(now_us, prompt(conversation, tokens), 1 + random(680) as usize)
            .unwrap();
    }
    for engine in &mut engines {
        engine.advance_into(FOREVER, &mut events);
    }
    let total = |field: fn(&EngineCounters) -> u64| engines.iter().map(|e| field(&e.counters())).sum::<u64>();
    assert_eq!(total(|counters| counters.finished), 12_000);
    println!(
        "12 000 requests, {} steps, {} tokens of output, {} of prefill, {} preemptions in {:?}",
        total(|counters| counters.steps),
        total(|counters| counters.generation_tokens),
        total(|counters| counters.computed_prefill_tokens),
        total(|counters| counters.preemptions),
        began.elapsed(),
    );
}

#[test]
fn a_front_end_comes_before_the_queue() {
    let front_end = FrontEnd {
        request_us: 3_000.0,
        prompt_token_us: 10.0,
        shares_core: false,
    };
    let mut engine = Engine::with_front_end(plain(64), front_end);
    let first = engine.submit(0, prompt(1, 100), 1).unwrap();
    let second = engine.submit(1_000, prompt(2, 50), 1).unwrap();
    let events = engine.advance(FOREVER);
    // 3 + 1 ms, then a step of 10 + 100 ms; the second is there long before that ends.
    assert_eq!(prefilled(&events, first).0, 4_000 + 110_000);
    assert_eq!(prefilled(&events, second).0, 114_000 + 60_000);
    let late = engine.submit(500_000, prompt(3, 10), 1).unwrap();
    assert_eq!(
        prefilled(&engine.advance(FOREVER), late).0,
        500_000 + 3_100 + 20_000
    );
}

#[test]
fn a_front_end_on_the_same_core_makes_the_running_step_longer() {
    let front_end = FrontEnd {
        request_us: 3_000.0,
        prompt_token_us: 0.0,
        shares_core: true,
    };
    let mut engine = Engine::with_front_end(plain(64), front_end);
    let first = engine.submit(0, prompt(1, 100), 1).unwrap();
    let second = engine.submit(50_000, prompt(2, 50), 1).unwrap();
    let third = engine.submit(112_000, prompt(3, 10), 1).unwrap();
    let events = engine.advance(FOREVER);
    let first_us = 3_000 + 110_000 + 2 * 3_000;
    assert_eq!(prefilled(&events, first).0, first_us);
    // Ready at 118 ms, so it is in the step with the second.
    assert_eq!(prefilled(&events, second).0, first_us + 70_000);
    assert_eq!(prefilled(&events, third).0, first_us + 70_000);
}
