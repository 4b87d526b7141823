// The points of the last hour, as the gateway returns them: whole at first, then only new ones.
import { sum } from "./dom.js";

const MAX_POINTS = 360;

export class History {
  constructor() { this.clear(); }

  clear() { Object.assign(this, { gateway: undefined, number: 0, at: [], series: {}, interval_s: 10 }); }

  // Returns false if the reply does not continue these points: another gateway answered, or it has restarted.
  take(reply) {
    const continues = reply.gateway === this.gateway && reply.number - reply.at.length === this.number;
    if (this.number && !continues) { this.clear(); return false; }
    for (const name of new Set([...Object.keys(this.series), ...Object.keys(reply.series)])) {
      const old = this.series[name] || this.at.map(() => null), added = reply.series[name] || reply.at.map(() => null);
      this.series[name] = [...old, ...added].slice(-MAX_POINTS);
    }
    this.at = [...this.at, ...reply.at].slice(-MAX_POINTS);
    Object.assign(this, { gateway: reply.gateway, number: reply.number, interval_s: reply.interval_s });
    return true;
  }

  get(name) { return this.series[name] || this.at.map(() => null); }

  // Suffixes of the series `prefix/…`.
  names(prefix) {
    return Object.keys(this.series).filter(name => name.startsWith(`${prefix}/`)).map(name => name.slice(prefix.length + 1)).sort(compare);
  }

  // Point by point, `part` / `whole`; null where nothing happened.
  ratio(part, whole) {
    const below = this.get(whole);
    return this.get(part).map((value, i) => value == null || !below[i] ? null : value / below[i]);
  }

  // What a rate adds up to within the last `points` points.
  growth(name, points = 6) { return this.interval_s * sum(this.get(name).slice(-points)); }
}

export const compare = (a, b) => a.localeCompare(b, undefined, { numeric: true });
